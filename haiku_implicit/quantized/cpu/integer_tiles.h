// Products of many rows of rounded activations with tiles of a matrix of integer codes.
//
// A tile is two vectors of rows. Four codes of each row at a time (a step) are beside each other, and are
// multiplied with four of a row of x, which are repeated. A group's sum is scaled once.

#ifndef HAIKU_IMPLICIT_KERNELS_INTEGER_TILES_H_
#define HAIKU_IMPLICIT_KERNELS_INTEGER_TILES_H_

#include "integers.h"

// The largest code of tiles; 0 if multiplying floats is as fast.
#if defined(HKI_VNNI)
constexpr int64_t kLargestTiled = 255;
#elif defined(HKI_AVX512) || defined(HKI_AVX2)
#define HKI_TILES_OF_16_BITS
constexpr int64_t kLargestTiled = kSmall;
#else
constexpr int64_t kLargestTiled = 0;
#endif

namespace {

constexpr int kTall = 2 * kLanes;     // rows of a tile
constexpr int kTogether = 4;          // rows of x that are multiplied together
constexpr int64_t kColumns = 64;      // rows of x that pass by while a tile's codes are near
constexpr int64_t kSteps = 64;        // the most that are summed before they are scaled
constexpr int64_t kRounded = 16;      // rows of x that a thread rounds at a time

// Sums of products in a tile; those of 16 bits have the products of the first and last two of four codes
// beside each other.
#if defined(HKI_TILES_OF_16_BITS)
using Sum = Words;
inline Sum add_step(Sum to, Wide a, Wide b) { return to + pairs(a, b); }
inline Floats as_floats(Sum sum) { return __builtin_convertvector(of_pairs(sum), Floats); }
inline int32_t added(int32_t to, int32_t first, int32_t last) {
  return (to + first & 0xffff) | (int32_t)((uint32_t)(to >> 16) + last << 16);
}
#else
using Sum = Ints;
inline Sum add_step(Sum to, Wide a, Wide b) { return add_products(to, a, b); }
inline Floats as_floats(Sum sum) { return __builtin_convertvector(sum, Floats); }
inline int32_t added(int32_t to, int32_t first, int32_t last) { return to + first + last; }
#endif

// How many steps of a group with so many are summed before they are scaled: an even number, so that the
// sums, which start with what values have too much, fit their bits. The products of a step are at most
// 2 * 128 times the largest value, for each 16 bits.
int64_t together(const Integers& w, int64_t steps) {
  int64_t most = kSteps;
#if defined(HKI_TILES_OF_16_BITS)
  const int64_t largest = std::max<int64_t>({w.bias, w.largest - w.bias, 1});
  most = std::min(most, 32767 / (2 * 128 * largest) / 2 * 2);
#endif
  const int64_t pieces = (steps + most - 1) / most;
  return round_up((steps + pieces - 1) / pieces, 2);
}

// Rounded rows of x in the order in which tiles need them, with zeros where there are no codes.
struct Columns {
  int64_t rows, steps, in_piece, pieces, groups;  // steps and pieces of a group; rows are whole `kTogether`
  int64_t width;   // rows that are beside each other: `kColumns`, or all
  int32_t* codes;  // [rows / width, groups, steps, width]: four each
  int32_t* start;  // [groups, pieces, rows]: sums of codes times what values have too much, negative
  float *scale, *sums;  // [groups, rows]

  Columns(const Integers& w, int64_t m)
      : rows(round_up(m, m > kColumns ? kColumns : kTogether)),
        steps(w.parts() * ((w.group_bytes() + 3) / 4)),
        in_piece(together(w, steps)),
        pieces((steps + in_piece - 1) / in_piece),
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
        const int32_t first = four[0] + four[1], last = four[2] + four[3];
        int32_t& begin = start[(i * pieces + step / in_piece) * rows + row];
        begin = added(begin, -w.bias * first, -w.bias * last);
        sum += first + last;
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

// One tile at a time.
template <bool nibbles>
class Tile {
 public:
  Tile(const Integers& integers, const Columns& x)
      : integers_(integers), w_(integers.w), x_(x) {
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
      for (int64_t i = 0; w_.offset.data && i < columns; i += kTogether) add_offsets(m0, i);
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
    const int64_t at = group * integers_.group_bytes() + 4 * from / P;
    if (at % 64 < 4 * steps / P)  // these rows' next bytes, and those of the next tile
      for (int r = 0; r < kTall; ++r) __builtin_prefetch(codes_[r] + at + kTall * w_.row_bytes(), 0, 2);
    beside(codes_, at, steps / P, beside_);
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
    const int64_t from = piece * x_.in_piece, steps = std::min(x_.in_piece, x_.steps - from);
    decode(group, from, steps);
    const int32_t* codes = x_.codes_at(group, from, m0);
    const int32_t* start = x_.start + (group * x_.pieces + piece) * x_.rows + m0;
    const float* scale = x_.scale + group * x_.rows + m0;
    const Floats first = load<Floats>(scales_ + group * kTall);
    const Floats second = load<Floats>(scales_ + group * kTall + kLanes);
    for (int64_t m = 0; m < columns; m += kTogether) {
      Sum sums[kTogether][2];
      HKI_UNROLL
      for (int i = 0; i < kTogether; ++i) sums[i][0] = sums[i][1] = (Sum)(Ints{} + start[m + i]);
      const int32_t* of_x = codes + m;
      for (int64_t step = 0; step < steps; ++step, of_x += x_.width) {
        const Wide one = tile_[2 * step], other = tile_[2 * step + 1];
        HKI_UNROLL
        for (int i = 0; i < kTogether; ++i) {
          const Wide four = (Wide)(Ints{} + of_x[i]);
          sums[i][0] = add_step(sums[i][0], one, four);
          sums[i][1] = add_step(sums[i][1], other, four);
        }
      }
      HKI_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        float* at = totals_ + (m + i) * kTall;
        const Floats of_row = Floats{} + scale[m + i];
        store(at, load<Floats>(at) + as_floats(sums[i][0]) * (first * of_row));
        store(at + kLanes, load<Floats>(at + kLanes) + as_floats(sums[i][1]) * (second * of_row));
      }
    }
  }

  // Adds the products of all offsets with the sums of some rows of x, of which `i` is the first.
  void add_offsets(int64_t m0, int64_t i) {
    Floats totals[kTogether][2];
    std::memcpy(totals, totals_ + i * kTall, sizeof(totals));
    for (int64_t group = 0; group < x_.groups; ++group) {
      const float* sums = x_.sums + group * x_.rows + m0 + i;
      HKI_UNROLL
      for (int n = 0; n < kTogether; ++n)
        for (int v = 0; v < 2; ++v)
          totals[n][v] += load<Floats>(offsets_ + group * kTall + v * kLanes) * sums[n];
    }
    std::memcpy(totals_ + i * kTall, totals, sizeof(totals));
  }

  const Integers& integers_;
  const Weights& w_;
  const Columns& x_;
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
