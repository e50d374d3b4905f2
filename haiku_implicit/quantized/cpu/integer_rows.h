// Products of few rows of activations, rounded to integers, with integer codes of a matrix.

#ifndef HAIKU_IMPLICIT_KERNELS_INTEGER_ROWS_H_
#define HAIKU_IMPLICIT_KERNELS_INTEGER_ROWS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "integers.h"

namespace {

// --- activations ---------------------------------------------------------------------------------

// Rows of activations, rounded to integers of D digits, each a byte with a sign. Where they have no codes of
// the matrix beside them, they are zero.
template <int D>
struct Rounded {
  int64_t rows, row_codes, row_starts, row_sums;
  int8_t* codes;   // [rows, pieces, vectors, D, parts, kWide], the first digit first
  int32_t* start;  // [rows, starts, kLanes]: the sums of codes times what values have too much, negative
  float* scale;    // [rows, starts, kLanes]
  float* sums;     // [rows, groups up to whole vectors]: of the values

  Rounded(const Integers& w, int64_t rows)
      : rows(rows),
        row_codes(w.pieces * w.vectors * D * w.parts * kWide),
        row_starts(w.starts * kLanes),
        row_sums(round_up(w.w.groups, kLanes)) {}

  // How much memory it takes, in numbers of four bytes.
  int64_t size() const { return rows * (row_codes / 4 + 2 * row_starts + row_sums); }
  void place(float* memory) {
    codes = reinterpret_cast<int8_t*>(memory);
    start = reinterpret_cast<int32_t*>(codes + rows * row_codes);
    scale = reinterpret_cast<float*>(start + rows * row_starts);
    sums = scale + rows * row_starts;
  }
};

// Puts the codes of groups, each of `size` bytes of the matrix, where `integer_rows` reads them.
template <int D>
HKI_INLINE void spread(const Integers& w, const int8_t* flat, int64_t size, int8_t* codes) {
  for (int64_t i = 0; i < w.w.groups; ++i)
    for (int64_t part = 0; part < w.parts; ++part)
      for (int64_t at = 0; at < size; at += kWide) {
        const int64_t byte = w.several ? i * size : i * w.vectors * kWide + at;
        std::memcpy(codes + (byte / kWide * D * w.parts + part) * kWide + byte % kWide,
                    flat + i * w.w.group + part * size + at, std::min(kWide, size - at));
      }
}

// Where integer sums of the products with some codes of activations start.
template <int D>
HKI_INLINE Ints start_of(const Integers& w, const int8_t* codes) {
  Ints start = {};
  for (int64_t p = 0; p < D * w.parts; ++p) {
    if (p % w.parts == 0) start <<= 8;
    start = add_products(start, Wide{} + 1, load<Wide>(codes + p * kWide));
  }
  return start;
}

// Rounds a row beside groups of several vectors, with a scale for each vector.
void round_vectors(const Integers& w, const float* x, const Rounded<3>& out) {
  const int64_t size = w.parts * kWide, length = w.w.length;
  float* part = scratch(size);  // the activations beside a vector
  std::fill_n(out.sums, out.row_sums, 0.0f);
  for (int64_t i = 0; i < w.starts; ++i) {
    const int64_t group = i / w.in_group, first = group * w.w.group + i % w.in_group * kWide;
    const int64_t width = std::min(kWide, w.group_bytes - i % w.in_group * kWide);
    std::fill_n(part, size, 0.0f);
    for (int64_t p = 0; p < w.parts; ++p) {
      const int64_t from = first + p * w.group_bytes;
      if (from < length) std::copy_n(x + from, std::min(width, length - from), part + p * kWide);
    }
    int8_t* codes = out.codes + i * 3 * size;
    const Floats scale = Floats{} + round_to_digits(part, size, codes, size);
    const Ints sums = start_of<3>(w, codes), start = -w.bias * sums;
    std::memcpy(out.start + i * kLanes, &start, sizeof(start));
    store(out.scale + i * kLanes, scale * w.unit);
    int32_t sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
    out.sums[group] += sum * scale[0];
  }
}

template <int D>
void round_row(const Integers& w, const float* x, int64_t row, bool in_groups, const Rounded<D>& out) {
  const int64_t groups = w.w.groups, starts = w.starts, each = out.row_codes / starts;
  const int64_t in_start = w.in_start, lanes = kLanes / in_start, flat_size = groups * w.w.group;
  float* scales = scratch(groups + kLanes + D * flat_size / 4 + 1);
  int8_t* flat = reinterpret_cast<int8_t*>(scales + groups + kLanes);
  std::fill_n(scales + groups, kLanes, 0.0f);
  round_parts<D>(w, x, in_groups, scales, flat);
  int8_t* codes = out.codes + row * out.row_codes;
  std::fill_n(codes, out.row_codes, 0);
  constexpr int64_t kUsual = 16;
  for (int d = 0; d < D; ++d, flat += flat_size) {
    int8_t* digits = codes + d * w.parts * kWide;
    w.group_bytes == kUsual ? spread<D>(w, flat, kUsual, digits)
                            : spread<D>(w, flat, w.group_bytes, digits);
  }
  const Ints of_lane = w.of_lanes();
  float* sums = out.sums + row * out.row_sums;
  std::fill_n(sums, out.row_sums, 0.0f);
  for (int64_t i = 0; i < starts; ++i) {
    Ints start = {};
    for (int64_t at = 0; at < each; at += D * w.parts * kWide)
      start += start_of<D>(w, codes + i * each + at);
    int32_t of_lanes[kLanes];
    std::memcpy(of_lanes, &start, sizeof(start));
    for (int64_t n = 0; n < in_start && i * in_start + n < groups; ++n)
      for (int64_t lane = n * lanes; lane < (n + 1) * lanes; ++lane) sums[i * in_start + n] += of_lanes[lane];
    start *= -w.bias;
    std::memcpy(out.start + row * out.row_starts + i * kLanes, &start, sizeof(start));
    const Floats scale = permuted(load<Floats>(scales + i * in_start), of_lane) * w.unit;
    store(out.scale + row * out.row_starts + i * kLanes, scale);
  }
  for (int64_t i = 0; i < groups; ++i) sums[i] *= scales[i];
}

// --- products ------------------------------------------------------------------------------------

// y[m0:m0+M, first:last]; rows that there are not are others, and not written. `single`: for starts of one
// vector each.
template <Values how, int M, int R, int D, bool single>
void integer_rows(const Integers& integers, const Rounded<D>& x, int64_t m0, int64_t first,
                  int64_t last, float* y) {
  const Weights& w = integers.w;
  const bool several = integers.several;
  const int64_t starts = integers.starts;
  const int64_t vectors = single || several ? 1 : integers.vectors;  // of a start; and its bytes and groups
  const int64_t bytes = integers.start_bytes(), groups = integers.in_start;
  const int64_t in_group = single ? integers.in_group : 1, step = how == kThreeBits ? bytes : kWide;
  constexpr int P = parts_of(how);
  const int64_t ahead = std::max(kAhead, R * w.stored);
  Span span(w);
  float* memory = scratch(span.size() + R * w.padded() / 4);
  span.place(memory);
  uint8_t* padded = reinterpret_cast<uint8_t*>(memory + span.size());
  const Ints of_lane = integers.of_lanes();
  Ints of_last;  // for the last start
  for (int i = 0; i < kLanes; ++i)
    of_last[i] = std::min<int64_t>(of_lane[i], w.groups - 1 - (starts - 1) / in_group * groups);
  const int8_t* codes_of_x[M];
  const int32_t* start[M];
  const float *scale_of_x[M], *sums_of_x[M];
  for (int m = 0; m < M; ++m) {
    const int64_t row = std::min(m0 + m, x.rows - 1);
    codes_of_x[m] = x.codes + row * x.row_codes;
    start[m] = x.start + row * x.row_starts;
    scale_of_x[m] = x.scale + row * x.row_starts;
    sums_of_x[m] = x.sums + row * x.row_sums;
  }
  for (int64_t next = first; first < last; first += R) {
    if (first == next) span.read(first, last), next += span.rows();
    Floats total[M][R] = {};
    const bool whole = w.rows - first > R + kBehind / w.row_bytes();  // (more rows follow)
    const uint8_t* codes[R];
    for (int r = 0; r < R; ++r)
      codes[r] = whole ? w.codes + (first + r) * w.row_bytes()
                       : w.codes_of(std::min(first + r, w.rows - 1), padded + r * w.padded());
    const float* scales = span.scales(first);
    int64_t left = in_group;
    const uint8_t* soon = w.codes + first * w.row_bytes() + ahead * w.step;  // R rows follow R rows
    for (int64_t i = 0, at_x = 0; i < starts; ++i) {
      Ints sums[M][R];
      HKI_UNROLL
      for (int m = 0; m < M; ++m)
        HKI_UNROLL
        for (int r = 0; r < R; ++r) sums[m][r] = load<Ints>(start[m] + i * kLanes);
      for (int64_t v = 0; v < (single ? 1 : vectors); ++v, at_x += D * P * kWide) {
        HKI_UNROLL
        for (int r = 0; r < R; ++r) {
          Wide values[P];
          integers.read<how>(codes[r] + i * bytes + v * kWide, values);
          if (how == kThreeBits || r * kWide % 64 == 0) __builtin_prefetch(soon + r * step * w.step, 0, 2);
          HKI_UNROLL
          for (int m = 0; m < M; ++m) {
            Wide of_x[D][P];
            for (int i = 0; i < D * P; ++i) of_x[i / P][i % P] = load<Wide>(codes_of_x[m] + at_x + i * kWide);
            Ints& sum = sums[m][r];
            if constexpr (D == 3)
              sum = add_small_products_of_digits<P>(sum, values, of_x);
            else if constexpr (how == kCounted || how == kSmallTable)
              sum = add_small_products(sum, values, of_x[0]);
            else
              for (int p = 0; p < P; ++p) sum = add_products(sum, values[p], of_x[0][p]);
          }
        }
        soon += R * step * w.step;
      }
      const Ints of = i + 1 < starts ? of_lane : of_last;
      HKI_UNROLL
      for (int r = 0; r < R; ++r) {
        const Floats scale = permuted(load<Floats>(scales + r * w.groups), of);
        HKI_UNROLL
        for (int m = 0; m < M; ++m)
          total[m][r] += __builtin_convertvector(sums[m][r], Floats) *
                         load<Floats>(scale_of_x[m] + i * kLanes) * scale;
      }
      if (--left == 0) scales += groups, left = in_group;
    }
    if (w.offset.data)
      for (int m = 0; m < M; ++m) span.add_offsets<R>(first, sums_of_x[m], total[m]);
    if (M == 1 && R == 4 && first + R <= last) {
      sum_four(total[0], y + m0 * w.rows + first);
      continue;
    }
    float all[M * R];
    for (int i = 0; i < M * R; i += 4) sum_four(&total[0][0] + i, all + i);
    for (int m = 0; m < M && m0 + m < x.rows; ++m)
      for (int r = 0; r < R && first + r < last; ++r)
        y[(m0 + m) * w.rows + first + r] = all[m * R + r];
  }
}

}  // namespace

#endif  // HAIKU_IMPLICIT_KERNELS_INTEGER_ROWS_H_
