// Products of many rows of rounded activations with tiles of a matrix of integer codes.
//
// A tile is two vectors of rows. Four codes of each row at a time (a step) are beside each other, and are
// multiplied with four of a row of x, which are repeated. A group's sum is scaled once.

#ifndef HAIKU_IMPLICIT_KERNELS_INTEGER_TILES_H_
#define HAIKU_IMPLICIT_KERNELS_INTEGER_TILES_H_

#include "integers.h"

// The largest code of tiles; 0 if multiplying floats is as fast. `maddubs` adds two products of a code and
// an activation of at least -128 in 16 bits: 2 * 127 * 128 = 32512 is below 2^15.
#if defined(HKI_VNNI)
constexpr int64_t kLargestTiled = 255;
#elif defined(HKI_AVX512) || defined(HKI_AVX2)
constexpr int64_t kLargestTiled = 127;
#else
constexpr int64_t kLargestTiled = 0;
#endif

namespace {

constexpr int kTall = 2 * kLanes;     // rows of a tile
constexpr int kTogether = 4;          // rows of x that are multiplied together
constexpr int64_t kColumns = 64;      // rows of x that pass by while a tile's codes are near
constexpr int64_t kSteps = 64;        // of a group, that are summed before they are scaled
constexpr int64_t kRounded = 16;      // rows of x that a thread rounds at a time

// Rounded rows of x in the order in which tiles need them, with zeros where there are no codes.
struct Columns {
  int64_t rows, steps, pieces, groups;  // steps and pieces of a group; rows are whole `kTogether`
  int64_t width;   // rows that are beside each other: `kColumns`, or all
  int32_t* codes;  // [rows / width, groups, steps, width]: four each
  int32_t* start;  // [groups, pieces, rows]: sums of codes times what values have too much, negative
  float *scale, *sums;  // [groups, rows]

  Columns(const Integers& w, int64_t m)
      : rows(round_up(m, m > kColumns ? kColumns : kTogether)),
        steps(w.parts() * ((w.group_bytes() + 3) / 4)),
        pieces((steps + kSteps - 1) / kSteps),
        groups(w.w.groups),
        width(std::min(rows, kColumns)) {}

  // The codes of a step of a group and a row, and of the rows after it.
  int32_t* codes_at(int64_t group, int64_t step, int64_t row) const {
    return codes + ((row / width * groups + group) * steps + step) * width + row % width;
  }
  int64_t size() const { return groups * rows * (steps + pieces + 2); }
  void place(float* memory) {
    std::fill_n(memory, size(), 0.0f);
    codes = reinterpret_cast<int32_t*>(memory);
    start = codes + groups * rows * steps;
    scale = reinterpret_cast<float*>(start + groups * rows * pieces);
    sums = scale + groups * rows;
  }

  void round(const Integers& w, const float* x, int64_t row, bool in_groups) const {
    const int64_t group = w.w.group, size = w.group_bytes(), parts = w.parts();
    float* scales = scratch(groups + groups * group / 4 + 1);
    int8_t* flat = reinterpret_cast<int8_t*>(scales + groups);
    round_parts(w, x, in_groups, scales, flat);
    for (int64_t i = 0; i < groups; ++i, flat += group) {
      int32_t sum = 0;
      for (int64_t step = 0; step < steps; ++step) {
        const int64_t at = step / parts * 4, count = std::min<int64_t>(4, size - at);
        int8_t four[4] = {};
        std::memcpy(four, flat + step % parts * size + at, count);
        std::memcpy(codes_at(i, step, row), four, 4);
        const int32_t of_step = four[0] + four[1] + four[2] + four[3];
        start[(i * pieces + step / kSteps) * rows + row] -= w.bias * of_step;
        sum += of_step;
      }
      scale[i * rows + row] = scales[i] * w.unit;
      sums[i * rows + row] = sum * scales[i];
    }
  }
};

// Four bytes of each of `kTall` rows beside each other, for `count` times four of them.
void beside(const uint8_t* const* codes, int64_t at, int64_t count, int32_t* out) {
#if defined(HKI_AVX512) || defined(HKI_AVX2)
  for (int64_t i = 0; i < count; i += 4)
    for (int r = 0; r < kTall; r += 4) {
      __m128 part[4];
      for (int n = 0; n < 4; ++n) part[n] = load<__m128>(codes[r + n] + at + 4 * i);
      _MM_TRANSPOSE4_PS(part[0], part[1], part[2], part[3]);
      for (int n = 0; n < 4; ++n)
        _mm_storeu_ps(reinterpret_cast<float*>(out + (i + n) * kTall + r), part[n]);
    }
#else
  for (int64_t i = 0; i < count; ++i)
    for (int r = 0; r < kTall; ++r) std::memcpy(out + i * kTall + r, codes[r] + at + 4 * i, 4);
#endif
}

using Sums = Ints[kTogether][2];

// Adds the products of some steps of a tile with rows of x. The sums of `deep` steps have 16 bits. (Called,
// so that registers have these sums, and not what they are added to.)
#if defined(HKI_AVX2)
HKI_ONCE
#endif
inline void add_steps(Sums& sums, const Wide* tile, int64_t steps, const int32_t* x, int64_t stride,
                      int64_t deep) {
#if !defined(HKI_VNNI) && (defined(HKI_AVX512) || defined(HKI_AVX2))
  for (int64_t step = 0; step < steps;) {
    Words part[kTogether][2] = {};
    for (const int64_t stop = std::min(steps, step + deep); step < stop; ++step, x += stride) {
      const Wide first = tile[2 * step], second = tile[2 * step + 1];
      HKI_UNROLL
      for (int m = 0; m < kTogether; ++m) {
        const Wide of_x = (Wide)(Ints{} + x[m]);
        part[m][0] += pairs(first, of_x);
        part[m][1] += pairs(second, of_x);
      }
    }
    HKI_UNROLL
    for (int m = 0; m < kTogether; ++m)
      for (int v = 0; v < 2; ++v) sums[m][v] += of_pairs(part[m][v]);
  }
#else
  for (int64_t step = 0; step < steps; ++step, x += stride) {
    const Wide first = tile[2 * step], second = tile[2 * step + 1];
    HKI_UNROLL
    for (int m = 0; m < kTogether; ++m) {
      const Wide of_x = (Wide)(Ints{} + x[m]);
      sums[m][0] = add_products(sums[m][0], first, of_x);
      sums[m][1] = add_products(sums[m][1], second, of_x);
    }
  }
#endif
}

// One tile at a time.
template <bool nibbles>
class Tile {
 public:
  Tile(const Integers& integers, const Columns& x)
      : integers_(integers), w_(integers.w), x_(x), deep_(32767 / (2 * 128 * integers.largest)) {
    float* memory = scratch(size());
    tile_ = reinterpret_cast<Wide*>(memory);
    beside_ = reinterpret_cast<int32_t*>(memory + 2 * kSteps * kLanes);
    totals_ = memory + 2 * kSteps * kLanes + (kSteps + 4) * kTall;
    scales_ = totals_ + kColumns * kTall;
    offsets_ = scales_ + w_.groups * kTall;
    of_row_ = offsets_ + w_.groups * kTall;
    padded_ = reinterpret_cast<uint8_t*>(of_row_ + round_up(w_.groups, kLanes));
  }

  // y[:, first:last] of at most `kTall`. Rows that there are not are others, and not written.
  void multiply(int64_t m, int64_t first, int64_t last, float* y) {
    for (int r = 0; r < kTall; ++r) {
      const int64_t row = std::min(first + r, w_.rows - 1);
      codes_[r] = w_.codes_of(row, padded_ + r * w_.padded());
      read(w_.scale, row, scales_ + r);
      if (w_.offset.data) read(w_.offset, row, offsets_ + r);
    }
    for (int64_t m0 = 0; m0 < m; m0 += kColumns) {
      const int64_t columns = round_up(std::min(kColumns, m - m0), kTogether);
      std::fill_n(totals_, columns * kTall, 0.0f);
      for (int64_t group = 0; group < x_.groups; ++group)
        for (int64_t piece = 0; piece < x_.pieces; ++piece) add(group, piece, m0, columns);
      for (int64_t i = 0; i < std::min(columns, m - m0); ++i)
        std::copy_n(totals_ + i * kTall, last - first, y + (m0 + i) * w_.rows + first);
    }
  }

 private:
  int64_t size() const {
    return 2 * kSteps * kLanes + (kSteps + 4 + kColumns + 2 * w_.groups) * kTall +
           round_up(w_.groups, kLanes) + kTall * w_.padded() / 4;
  }

  // A row's numbers, into a column.
  void read(const Numbers& numbers, int64_t row, float* out) {
    numbers.read(w_.scales_before(row), w_.groups, of_row_);
    for (int64_t group = 0; group < w_.groups; ++group) out[group * kTall] = of_row_[group];
  }

  // Values of some steps of a group.
  void decode(int64_t group, int64_t from, int64_t steps) {
    constexpr int P = nibbles ? 2 : 1;
    const Wide table = integers_.table;
    beside(codes_, group * integers_.group_bytes() + 4 * from / P, steps / P, beside_);
    for (int64_t i = 0; i < steps / P; ++i)
      for (int v = 0; v < 2; ++v) {
        const Wide codes = load<Wide>(beside_ + i * kTall + v * kLanes);
        Wide* out = tile_ + 2 * P * i + v;
        if constexpr (nibbles) {
          out[0] = lookup(table, codes & 15);
          out[2] = lookup(table, (Wide)((UnsignedWords)codes >> 4) & 15);
        } else {
          out[0] = codes + table;
        }
      }
  }

  // Adds the products of a piece of a group with rows of x.
  void add(int64_t group, int64_t piece, int64_t m0, int64_t columns) {
    const int64_t from = piece * kSteps, steps = std::min(kSteps, x_.steps - from);
    decode(group, from, steps);
    const int32_t* codes = x_.codes_at(group, from, m0);
    const int32_t* start = x_.start + (group * x_.pieces + piece) * x_.rows + m0;
    const float *scale = x_.scale + group * x_.rows + m0, *sum = x_.sums + group * x_.rows + m0;
    Floats scales[2], offsets[2];
    for (int v = 0; v < 2; ++v) {
      scales[v] = load<Floats>(scales_ + group * kTall + v * kLanes);
      offsets[v] = load<Floats>(offsets_ + group * kTall + v * kLanes);
    }
    const bool with_offset = w_.offset.data && piece == 0;
    for (int64_t m = 0; m < columns; m += kTogether) {
      Sums sums;
      HKI_UNROLL
      for (int i = 0; i < kTogether; ++i) sums[i][0] = sums[i][1] = Ints{} + start[m + i];
      add_steps(sums, tile_, steps, codes + m, x_.width, deep_);
      HKI_UNROLL
      for (int i = 0; i < kTogether; ++i)
        for (int v = 0; v < 2; ++v) {
          float* at = totals_ + (m + i) * kTall + v * kLanes;
          Floats total = load<Floats>(at);
          total += __builtin_convertvector(sums[i][v], Floats) * (scales[v] * scale[m + i]);
          if (with_offset) total += offsets[v] * sum[m + i];
          store(at, total);
        }
    }
  }

  const Integers& integers_;
  const Weights& w_;
  const Columns& x_;
  const int64_t deep_;  // steps; the largest sum of 16 bits is deep * 2 * 128 * largest < 2^15
  Wide* tile_;          // [steps, 2]
  int32_t* beside_;
  float *totals_, *scales_, *offsets_, *of_row_;
  uint8_t* padded_;
  const uint8_t* codes_[kTall];
};

// y [m, rows], by tiles.
void by_tiles(const Integers& w, const float* x, int64_t m, bool in_groups, float* y, Team team) {
  Columns columns(w, m);
  columns.place(scratch<1>(columns.size()));
  team.each((m + kRounded - 1) / kRounded, [&](int64_t i) {
    for (int64_t row = i * kRounded; row < std::min(m, (i + 1) * kRounded); ++row)
      columns.round(w, x + row * w.w.length, row, in_groups);
  });
  const auto part = [&](auto nibbles, int64_t first, int64_t last) {
    Tile<decltype(nibbles)::value> tile(w, columns);
    for (; first < last; first += kTall)
      tile.multiply(m, first, std::min<int64_t>(last, first + kTall), y);
  };
  team.parts(w.w.rows, kTall, 4 * kTall, [&](int64_t first, int64_t last) {
    w.w.nibbles() ? part(std::true_type(), first, last) : part(std::false_type(), first, last);
  });
}

}  // namespace

#endif  // HAIKU_IMPLICIT_KERNELS_INTEGER_TILES_H_
