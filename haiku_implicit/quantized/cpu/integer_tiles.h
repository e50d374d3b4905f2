// Products of many rows of rounded activations with tiles of a matrix of integer codes.
//
// A tile is two vectors of rows. Four codes of each row at a time (a step) are beside each other, and are
// multiplied with four of a row of x, which are repeated. The sum of a group, or of so many steps of it that
// they fit 16 bits, is scaled once.

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
constexpr int kTogether = kRegisters / 4;  // rows of x that are multiplied together
constexpr int64_t kColumns = 64;      // rows of x that pass by while a tile's codes are near
constexpr int64_t kSteps = 64;        // the most that are summed before they are scaled
constexpr int64_t kLine = 64;         // bytes of memory that come together
constexpr int64_t kRounded = 16;      // rows of x that are rounded together: whole vectors of them

// Sums of products in a tile; those of 16 bits have the products of the first and last two of four codes
// beside each other.
#if defined(HKI_TILES_OF_16_BITS)
using Sum = Words;
using SumElement = int16_t;
inline Sum add_step(Sum to, Wide a, Wide b) { return to + pairs(a, b); }
inline Floats as_floats(Sum sum) { return __builtin_convertvector(of_pairs(sum), Floats); }
#else
using Sum = Ints;
using SumElement = int32_t;
inline Sum add_step(Sum to, Wide a, Wide b) { return add_products(to, a, b); }
inline Floats as_floats(Sum sum) { return __builtin_convertvector(sum, Floats); }
#endif

// A sum that the compiler does not put together with later ones: that takes more registers.
inline Sum in_order(Sum sum) {
#if defined(HKI_TILES_OF_16_BITS)
  asm("" : "+x"(sum));
#endif
  return sum;
}

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
  int64_t rows, steps, in_piece, pieces, groups;  // steps and pieces of a group; rows are whole `kRounded`
  int64_t width;   // rows that are beside each other: `kColumns`, or all
  int32_t* codes;  // [rows / width, groups, width / kTogether, steps, kTogether]: four each
  int32_t* start;  // [groups, pieces, rows]: sums of codes times what values have too much, negative
  float *scale, *sums;  // [groups, rows]

  Columns(const Integers& w, int64_t m)
      : rows(round_up(m, m > kColumns ? kColumns : kRounded)),
        steps(w.parts * ((w.group_bytes + 3) / 4)),
        in_piece(together(w, steps)),
        pieces((steps + in_piece - 1) / in_piece),
        groups(w.w.groups),
        width(std::min(rows, kColumns)) {}

  // The codes of a step of a group and a row, and of the rows that are multiplied together with it.
  int32_t* codes_at(int64_t group, int64_t step, int64_t row) const {
    const int64_t column = row % width / kTogether * kTogether;
    return codes + ((row / width * groups + group) * width + column) * steps + step * kTogether;
  }
  int64_t size() const { return groups * rows * (steps + pieces + 2); }
  void place(float* memory) {
    codes = reinterpret_cast<int32_t*>(memory);
    start = codes + groups * rows * steps;
    scale = reinterpret_cast<float*>(start + groups * rows * pieces);
    sums = scale + groups * rows;
  }

  // Rounds `kRounded` rows of x, or as many as there are, and writes each step of all of them together.
  void round(const Integers& w, const float* x, int64_t first, int64_t m, bool in_groups) const {
    constexpr int kVectorsOfRows = kRounded / kLanes;
    const int64_t group = w.w.group, size = w.group_bytes, parts = w.parts;
    const int64_t stride = round_up(groups * group, 64) + 64;  // not a power of two
    float* scales = scratch(kRounded * (groups + stride / 4));
    int8_t* flat = reinterpret_cast<int8_t*>(scales + kRounded * groups);
    for (int64_t r = 0; r < kRounded; ++r)
      if (first + r < m) {
        round_parts<1>(w, x + (first + r) * w.w.length, in_groups, scales + r * groups, flat + r * stride);
      } else {
        std::fill_n(scales + r * groups, groups, 0.0f);
        std::fill_n(flat + r * stride, groups * group, 0);
      }
    for (int64_t i = 0; i < groups; ++i)
      for (int v = 0; v < kVectorsOfRows; ++v) {
        const int64_t row = first + v * kLanes;
        Floats total = {}, of_group;
        for (int64_t piece = 0; piece < pieces; ++piece) {
          const int64_t end = std::min(steps, (piece + 1) * in_piece);
          Sum sum = {};
          for (int64_t step = piece * in_piece; step < end; ++step) {
            const int64_t at = step / parts * 4, bits = 8 * std::min<int64_t>(4, size - at);
            const int8_t* from = flat + v * kLanes * stride + i * group + step % parts * size + at;
            Ints four;
            HKI_UNROLL
            for (int r = 0; r < kLanes; ++r) std::memcpy(&four[r], from + r * stride, 4);
            four &= static_cast<int32_t>(0xffffffff >> (32 - bits));
            for (int64_t r = 0; r < kLanes; r += kTogether)
              std::memcpy(codes_at(i, step, row + r), &four[r], kTogether * sizeof(int32_t));
            sum = add_step(sum, Wide{} + 1, (Wide)four);
          }
          total += as_floats(sum);
          sum *= static_cast<SumElement>(-w.bias);
          std::memcpy(start + (i * pieces + piece) * rows + row, &sum, sizeof(sum));
        }
        for (int r = 0; r < kLanes; ++r) of_group[r] = scales[(v * kLanes + r) * groups + i];
        store(scale + i * rows + row, of_group * w.unit);
        store(sums + i * rows + row, total * of_group);
      }
  }
};

#if defined(HKI_AVX512) || defined(HKI_AVX2)
// Transposes the matrices of 4 x 4 elements that are beside each other.
HKI_INLINE void transpose_four(Wide* rows) {
#if defined(HKI_AVX512)
#define HKI_UNPACK(which, a, b) _mm512_unpack##which((__m512i)(a), (__m512i)(b))
#else
#define HKI_UNPACK(which, a, b) _mm256_unpack##which((__m256i)(a), (__m256i)(b))
#endif
  const auto a = HKI_UNPACK(lo_epi32, rows[0], rows[1]), b = HKI_UNPACK(lo_epi32, rows[2], rows[3]);
  const auto c = HKI_UNPACK(hi_epi32, rows[0], rows[1]), d = HKI_UNPACK(hi_epi32, rows[2], rows[3]);
  rows[0] = (Wide)HKI_UNPACK(lo_epi64, a, b), rows[1] = (Wide)HKI_UNPACK(hi_epi64, a, b);
  rows[2] = (Wide)HKI_UNPACK(lo_epi64, c, d), rows[3] = (Wide)HKI_UNPACK(hi_epi64, c, d);
}
#undef HKI_UNPACK
#endif

// Calls `f(i, v, four)` with four bytes of each of a vector's rows, for `count` times four bytes, and up to
// three times more: `v` says which of two vectors they are of.
template <class F>
HKI_INLINE void beside(const uint8_t* const* rows, int64_t count, const F& f) {
#if defined(HKI_AVX512) || defined(HKI_AVX2)
  constexpr int64_t kFours = kLine / 4;  // taken at once: a line may not stay near, where rows share few sets
  for (int64_t line = 0; line < count; line += kFours)
    for (int v = 0; v < 2; ++v)
      for (int64_t i = line; i < std::min(line + kFours, count); i += 4) {
        const auto two = [&](int r) HKI_INLINED {
          const uint8_t* const* of = rows + v * kLanes + r;
          const __m256i first = _mm256_castsi128_si256(load<__m128i>(of[0] + 4 * i));
          return _mm256_inserti128_si256(first, load<__m128i>(of[4] + 4 * i), 1);
        };
        Wide part[4];  // rows n, n + 4 ...
        repeat<4>([&](auto n) HKI_INLINED {
#if defined(HKI_AVX512)
          part[n] = (Wide)_mm512_inserti64x4(_mm512_castsi256_si512(two(n)), two(n + 8), 1);
#else
          part[n] = (Wide)two(n);
#endif
        });
        transpose_four(part);
        repeat<4>([&](auto n) HKI_INLINED { f(i + n, v, part[n]); });
      }
#else
  for (int64_t i = 0; i < count; ++i)
    for (int v = 0; v < 2; ++v) {
      Ints four;
      for (int r = 0; r < kLanes; ++r) std::memcpy(&four[r], rows[v * kLanes + r] + 4 * i, 4);
      f(i, v, (Wide)four);
    }
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
    totals_ = memory + (x.groups * x.steps + kBehindTile) * kTall;
    scales_ = totals_ + kColumns * kTall;
    offsets_ = scales_ + round_up(w_.groups, 4) * kTall;
    of_rows_ = offsets_ + round_up(w_.groups, 4) * kTall;
    padded_ = reinterpret_cast<uint8_t*>(of_rows_ + round_up(w_.groups, kLanes) * kTall);
  }

  // y[:, first:last] of at most `kTall`. Rows that there are not are others, and not written.
  void multiply(int64_t m, int64_t first, int64_t last, float* y) {
    for (int r = 0; r < kTall; ++r) {
      const int64_t row = std::min(first + r, w_.rows - 1);
      codes_[r] = w_.codes_of(row, padded_ + r * w_.padded());
    }
    read(w_.scale, first, scales_);
    if (w_.offset.data) read(w_.offset, first, offsets_);
    decode();
    const bool usual = x_.pieces == 1 && x_.steps == kUsual;
    for (int64_t m0 = 0; m0 < m; m0 += kColumns) {
      const int64_t columns = round_up(std::min(kColumns, m - m0), kTogether);
      for (int64_t i = 0; i < columns; ++i)
        for (int v = 0; v < 2; ++v) store(totals_ + i * kTall + v * kLanes, Floats{});
      for (int64_t group = 0; group < x_.groups; ++group) {
        for (int64_t piece = 0; piece < x_.pieces; ++piece) {
          if (m0 == 0) ask_for_next(first, group, piece);
          usual ? add<kUsual>(group, piece, m0, columns) : add<0>(group, piece, m0, columns);
        }
      }
      for (int64_t i = 0; w_.offset.data && i < columns; i += kTogether) add_offsets(m0, i);
      for (int64_t i = 0; i < std::min(columns, m - m0); ++i) {
        float *out = y + (m0 + i) * w_.rows + first, *total = totals_ + i * kTall;
        if (last - first == kTall)
          std::memcpy(out, total, kTall * sizeof(float));  // (without a call)
        else
          std::copy_n(total, last - first, out);
      }
    }
  }

 private:
  static constexpr int kParts = nibbles ? 2 : 1;
  static constexpr int64_t kBehindTile = 3 * kParts;  // steps that are decoded, and of no meaning

  int64_t size() const {
    return (x_.groups * x_.steps + kBehindTile + kColumns + 3 * round_up(w_.groups, kLanes) +
            w_.padded() / 4) * kTall;
  }

  // Each row's numbers, into a column.
  void read(const Numbers& numbers, int64_t first, float* out) {
    const uint8_t* rows[kTall];
    for (int r = 0; r < kTall; ++r) {
      float* of_row = of_rows_ + r * round_up(w_.groups, kLanes);
      const int64_t at = w_.scales_before(std::min(first + r, w_.rows - 1));
      if (w_.groups % 4) numbers.read(at, w_.groups, of_row);  // (four are read at a time)
      rows[r] = reinterpret_cast<const uint8_t*>(w_.groups % 4 ? of_row : numbers.floats(at, w_.groups, of_row));
    }
    beside(rows, w_.groups, [&](int64_t i, int v, Wide four) HKI_INLINED {
      store(out + i * kTall + v * kLanes, (Floats)four);
    });
  }

  // A piece's share of the codes and scales of the next tile, not all at once: the CPU foresees no rows that are
  // this far apart, and few misses may be pending. (Inline: GCC drops calls of functions that only ask.)
  HKI_INLINE void ask_for_next(int64_t first, int64_t group, int64_t piece) const {
    const int64_t lines = kTall * w_.stored / kLine, pieces = x_.groups * x_.pieces;
    const int64_t at = group * x_.pieces + piece;
    for (int64_t i = at * lines / pieces; i < (at + 1) * lines / pieces; ++i)
      __builtin_prefetch(codes_[i % kTall] + kTall * w_.row_bytes() + i / kTall * kLine);
    if (piece == 0 && w_.step == 1) w_.scale.prefetch(w_.scales_before(first + kTall) + group * kTall, kTall);
  }

  // Values of all steps. (Groups of whole steps follow each other.)
  void decode() {
    const int64_t size = integers_.group_bytes, runs = size % 4 ? x_.groups : 1;
    const int64_t count = x_.groups * x_.steps / kParts / runs;
    const Wide table = integers_.table;
    const uint8_t* rows[kTall];
    for (int64_t run = 0; run < runs; ++run) {
      for (int r = 0; r < kTall; ++r) rows[r] = codes_[r] + run * size;
      beside(rows, count, [&, out = tile_ + 2 * kParts * count * run](int64_t i, int v, Wide codes) HKI_INLINED {
        Wide* const to = out + 2 * kParts * i + v;
        if constexpr (nibbles) {
          to[0] = lookup(table, codes & 15);
          to[2] = lookup(table, (Wide)((UnsignedWords)codes >> 4) & 15);
        } else {
          to[0] = codes + table;
        }
      });
    }
  }

  static constexpr int kUsual = 8;  // steps of groups of 32, and so many at a time

  // Adds the products of a piece of a group, of so many steps if these are known, with rows of x. (Compiled apart:
  // so its vectors stay in registers.)
  template <int known>
  HKI_ONCE void add(int64_t group, int64_t piece, int64_t m0, int64_t columns) {
    const int64_t from = piece * x_.in_piece;
    const int64_t steps = known ? known : std::min(x_.in_piece, x_.steps - from);
    const Wide* tile = tile_ + 2 * (group * x_.steps + from);
    const int32_t* codes = x_.codes_at(group, from, m0);
    const int32_t* start = x_.start + (group * x_.pieces + piece) * x_.rows + m0;
    const float* scale = x_.scale + group * x_.rows + m0;
    const Floats first = load<Floats>(scales_ + group * kTall);
    const Floats second = load<Floats>(scales_ + group * kTall + kLanes);
    for (int64_t m = 0; m < columns; m += kTogether) {
      Sum sums[kTogether][2];
      repeat<kTogether>([&](auto i) HKI_INLINED { sums[i][0] = sums[i][1] = (Sum)(Ints{} + start[m + i]); });
      const int32_t* of_x = codes + m * (known ? known : x_.steps);
      const Wide* of_tile = tile;
      const auto add_steps = [&](auto count) HKI_INLINED {
        repeat<count>([&](auto) HKI_INLINED {
          const Wide one = of_tile[0], other = of_tile[1];
          repeat<kTogether>([&](auto i) HKI_INLINED {
            const Wide four = (Wide)(Ints{} + of_x[i]);
            sums[i][0] = in_order(add_step(sums[i][0], one, four));
            sums[i][1] = in_order(add_step(sums[i][1], other, four));
          });
          of_tile += 2, of_x += kTogether;
        });
      };
      int64_t left = steps;
      for (; left >= kUsual; left -= kUsual) add_steps(std::integral_constant<int, kUsual>());
      for (; left; --left) add_steps(std::integral_constant<int, 1>());
      repeat<kTogether>([&](auto i) HKI_INLINED {
        float* at = totals_ + (m + i) * kTall;
        const float of_row = scale[m + i];
        store(at, load<Floats>(at) + as_floats(sums[i][0]) * (first * of_row));
        store(at + kLanes, load<Floats>(at + kLanes) + as_floats(sums[i][1]) * (second * of_row));
      });
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
  Wide* tile_;          // [groups, steps, 2]
  float *totals_, *scales_, *offsets_, *of_rows_;
  uint8_t* padded_;
  const uint8_t* codes_[kTall];
};

// y [m, rows], by tiles.
void by_tiles(const Integers& w, const float* x, int64_t m, bool in_groups, float* y, Team team) {
  Columns columns(w, m);
  columns.place(scratch<1>(columns.size()));
  team.each((m + kRounded - 1) / kRounded, [&](int64_t i) {
    columns.round(w, x, i * kRounded, m, in_groups);
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
