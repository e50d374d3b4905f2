// Products of one row of activations with codes of four bits that stand for any 16 values, as integers.

#ifndef HAIKU_IMPLICIT_KERNELS_TABLE_ROWS_H_
#define HAIKU_IMPLICIT_KERNELS_TABLE_ROWS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "integers.h"

#if defined(HKI_AVX2)
namespace {

// Values as integers of 23 bits, `128 * word + rest - 64`, by a table for each byte.
struct FixedTable {
  Wide high, low, rest;  // high and low bytes of words, which have a sign
  float unit;            // of products with `RowInWords`

  // False if some values are so small that few digits of them would be left.
  bool set(const float* values) {
    float largest = 0;
    for (int i = 0; i < 16; ++i) largest = std::max(largest, std::abs(values[i]));
    if (!(largest > 1e-10f && largest < 1e10f)) return false;
    const float inverse = ((1 << 22) - 128) / largest;  // (so that the largest are words, too)
    for (int i = 0; i < kWide; ++i) {
      const float value = values[i % 16];
      if (value && std::abs(value) < largest / 32) return false;
      const int32_t whole = std::rint(value * inverse), word = whole + 64 >> 7;
      high[i] = word >> 8, low[i] = word, rest[i] = whole - word * 128 + 64;
    }
    unit = 128 * 4096 / inverse;
    return true;
  }
};

// One row of activations as integers of 25 bits, `scale * (4096 * first + second)`. The products are
// 128 * 4096 * (word * first + (word * second + 2048 * (rest - 64) * byte) / 4096), with the first seven bits of an
// activation in place of all of them beside `rest`. They are where the words and bytes of values come.
struct RowInWords {
  // For each half of the bytes, two vectors of `first` and two of `second`; the bytes of each half; and where sums
  // that become 4096th start: what `rest` has too much is not counted, and half of the unit makes them round.
  static constexpr int64_t kHalf = 4 * kWide, kSize = 2 * kHalf + 3 * kWide;
  static constexpr int kOfRest = 1 << 11;
  static constexpr float kWhole = 1 << 23;  // sums are divided by it, since scales of integers may be zero in float32
  const Integers& w;
  int64_t starts, groups;  // vectors of codes; groups, up to whole vectors of floats
  char* codes;             // [starts, kSize]
  float *scale, *sums;     // [groups]: their scales, and the sums of activations

  // Groups of 32, two in a vector, each in one half; or of whole vectors.
  static bool fits(const Integers& w) { return 2 * w.group_bytes == kWide || w.group_bytes % kWide == 0; }

  explicit RowInWords(const Integers& w)
      : w(w), starts(w.pieces * w.vectors), groups(round_up(w.w.groups, kLanes)) {}
  int64_t size() const { return starts * kSize / 4 + 2 * groups; }
  void place(float* memory) {
    codes = reinterpret_cast<char*>(memory), scale = memory + starts * kSize / 4, sums = scale + groups;
  }

  // With scales of products with values in this unit.
  void round(const float* x, float unit) {
    std::fill_n(codes, starts * kSize, 0);
    std::fill_n(scale, 2 * groups, 0.0f);
    const int64_t group = w.w.group;
    for (int64_t i = 0; i < w.w.groups; ++i)
      round_group(i, x + i * group, std::min(group, w.w.length - i * group), unit);
    for (int64_t i = 0; i < starts; ++i) {
      char* const own = codes + i * kSize + 2 * kHalf;
      const auto sum = [&](int half) { return pairs(Wide{} + 64, load<Wide>(own + half * kWide)); };
      const Ints start = 2048 - of_pairs(sum(0) + sum(1), kOfRest);
      std::memcpy(own + 2 * kWide, &start, sizeof(start));
    }
  }

 private:
  void round_group(int64_t i, const float* x, int64_t length, float unit) {
    float largest = 0, sum = 0;
    for (int64_t k = 0; k < length; ++k) largest = std::max(largest, std::abs(x[k])), sum += x[k];
    const int32_t exponent = std::max(Numbers::bits_of(largest) >> 23, 24);  // (the largest is below 2^24)
    const float inverse = Numbers::as_float(277 - exponent << 23);
    scale[i] = Numbers::as_float(exponent - 23 << 23) * kWhole * unit, sums[i] = sum;
    constexpr int kRun = 8;  // elements that stay together
    for (int64_t k = 0; k < length; k += kRun) {
      const int64_t half = k / w.group_bytes, byte = i * w.group_bytes + k % w.group_bytes;
      char* const own = codes + byte / kWide * kSize;
      const int64_t at = byte % kWide / 16 * 8 + byte % 8, vector = byte / 8 % 2;
      const int64_t count = std::min<int64_t>(kRun, length - k);
      int16_t words[2][kRun];
      int8_t bytes[kRun];
      for (int j = 0; j < count; ++j) {
        const int32_t whole = std::rint(x[k + j] * inverse);
        words[0][j] = whole + 2048 >> 12, words[1][j] = whole - words[0][j] * 4096, bytes[j] = whole + (1 << 17) >> 18;
      }
      for (int word = 0; word < 2; ++word)
        std::memcpy(own + half * kHalf + (2 * word + vector) * kWide + 2 * at, words[word], 2 * count);
      std::memcpy(own + 2 * kHalf + half * kWide + byte % kWide, bytes, count);
    }
  }
};

// y[first:last]. `several`: for vectors of several groups; `single`: for groups of one vector each.
template <int R, bool several, bool single>
void table_rows(const FixedTable& table, const RowInWords& x, int64_t first, int64_t last, float* y) {
  const Weights& w = x.w.w;
  const int64_t ahead = std::max(kAhead, R * w.stored), in_start = several ? x.w.in_start : 1;
  const int64_t vectors = x.w.vectors, of_row = x.groups + kLanes;
  Span span(w);
  float* scales = scratch(span.size() + R * (of_row + w.padded() / 4));  // [R, of_row]: of products
  std::fill_n(scales, R * of_row, 0.0f);
  span.place(scales + R * of_row);
  uint8_t* padded = reinterpret_cast<uint8_t*>(scales + R * of_row + span.size());
  const Ints of_lane = x.w.of_lanes();
  const Wide high = table.high, low = table.low, rest = table.rest;
  for (int64_t next = first; first < last; first += R) {
    if (first == next) span.read(first, last), next += span.rows();
    const uint8_t* codes[R];
    for (int r = 0; r < R; ++r) {
      codes[r] = w.codes_of(std::min(first + r, w.rows - 1), padded + r * w.padded());
      const float* found = span.scales(first + r);
      for (int64_t i = 0; i < w.groups; ++i) scales[r * of_row + i] = found[i] * x.scale[i];
    }
    Floats total[R] = {};
    const uint8_t* soon = w.codes + first * w.row_bytes() + ahead * w.step;  // R rows follow R rows
    const char* of_x = x.codes;
    for (int64_t i = 0, group = 0, vector = 0; i < x.starts; ++i, of_x += RowInWords::kSize) {
      const char* bytes_of_x = of_x + 2 * RowInWords::kHalf;
      HKI_UNROLL
      for (int r = 0; r < R; ++r) {
        if (r * kWide % 64 == 0) __builtin_prefetch(soon + r * kWide * w.step, 0, 2);
        const Wide found = load<Wide>(codes[r] + i * kWide);
        Ints firsts = {}, seconds = load<Ints>(bytes_of_x + 2 * kWide);
        Words small[2];
        HKI_UNROLL
        for (int half = 0; half < 2; ++half) {
          const Wide index = (half ? (Wide)((UnsignedWords)found >> 4) : found) & 15;
          const __m256i a = (__m256i)lookup(low, index), b = (__m256i)lookup(high, index);
          const __m256i words[] = {_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)};
          const char* own = of_x + half * RowInWords::kHalf;
          HKI_UNROLL
          for (int i = 0; i < 2; ++i) {
            firsts += (Ints)_mm256_madd_epi16(words[i], load<__m256i>(own + i * kWide));
            seconds += (Ints)_mm256_madd_epi16(words[i], load<__m256i>(own + (2 + i) * kWide));
          }
          small[half] = pairs(lookup(rest, index), load<Wide>(bytes_of_x + half * kWide));
        }
        seconds += of_pairs(small[0] + small[1], RowInWords::kOfRest);
        const float* scale = scales + r * of_row + group;
        total[r] += __builtin_convertvector(firsts + (seconds >> 12), Floats) * (1 / RowInWords::kWhole) *
                    (several ? permuted(load<Floats>(scale), of_lane) : (Floats)_mm256_broadcast_ss(scale));
      }
      soon += R * kWide * w.step;
      if (several || single || ++vector == vectors) vector = 0, group += in_start;
    }
    if (w.offset.data) span.add_offsets<R>(first, x.sums, total);
    float all[R];
    for (int r = 0; r < R; r += 4) sum_four(total + r, all + r);
    std::copy_n(all, std::min<int64_t>(R, last - first), y + first);
  }
}

}  // namespace
#endif

#endif  // HAIKU_IMPLICIT_KERNELS_TABLE_ROWS_H_
