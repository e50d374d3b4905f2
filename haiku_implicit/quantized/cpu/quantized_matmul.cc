// Products of dense activations with a matrix that is stored as codes and scales, for XLA on CPUs.
//
// A matrix W[rows, length] has, in each row, groups of codes that share a scale (and an offset):
// W = scale * table[code] + offset. Two products, with float32 activations and sums:
//   along the groups:   y[m, row] = sum over k of x[m, k] * W[row, k]
//   along the rows:     y[m, k]   = sum over rows of x[m, row] * W[row, k]
//
// One row of x is multiplied with codes of 2 to 4 bits as integers (`by_integers`). Otherwise, for up to
// eight rows (two or four for 4 bits in groups), codes are decoded in registers: along the groups
// (`few_rows`), where memory is asked for ahead, as rows of a few hundred bytes are too short for the CPU to
// foresee the next, and along short rows (`short_rows`). Else blocks of W that fit the L2 cache are decoded
// there, for many rows of x at a time, and one register-blocked loop (`multiply`) does the products of both
// kinds.
//
// Compiled for the very CPU that it runs on: the width of vectors is a constant.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <type_traits>

#include "codes.h"
#include "integer_rows.h"
#include "table_rows.h"
#include "threads.h"

namespace {

// --- few rows of activations, along the groups ---------------------------------------------------

struct Activations {
  const float* data;  // [rows, length], rows `stride` apart
  int64_t rows, length, stride;

  // Whether sums of their products with any codes are finite before they are scaled, and no row is so small
  // that parts of its numbers are not.
  bool moderate() const {
    bool all = true;
    for (int64_t m = 0; m < rows; ++m) {
      int32_t largest = 0;
      for (int64_t k = 0; k < length; ++k)
        largest = std::max(largest, Numbers::bits_of(data[m * stride + k]) & 0x7fffffff);
      const float found = Numbers::as_float(largest);
      all &= found < 1e25f && (found > 1e-15f || !largest);
    }
    return all;
  }
};

constexpr int64_t kApart = 16;  // by how much more than their length rows are apart

// M rows of x and R rows of the matrix, from `first` on. In place of rows that there are not are others,
// whose products are computed and not written.
template <int M, int R>
class Few {
 public:
  using Sums = Floats[M][R];

  Few(const Weights& w, const Activations& x, int64_t first) : w_(w), x_(x), first_(first) {
    for (int m = 0; m < M; ++m) x_rows_[m] = x.data + std::min<int64_t>(m, x.rows - 1) * x.stride;
  }

  int64_t row(int r) const { return std::min(first_ + r, w_.rows - 1); }

  // Adds the products of a row's values with the elements from k on.
  void add(Sums& sums, int r, const Floats (&values)[kVectors], int64_t k) const {
    HKI_UNROLL
    for (int m = 0; m < M; ++m)
      HKI_UNROLL
      for (int v = 0; v < kVectors; ++v)
        sums[m][r] += values[v] * load<Floats>(x_rows_[m] + k + v * kLanes);
  }

  // Adds the products of offsets with the sums of x in each group, `[M, groups]`.
  void add_offsets(Sums& sums, const Span& span, const float* sums_of_x, int64_t groups) const {
    for (int m = 0; m < M; ++m)
      span.add_offsets<R>(first_, sums_of_x + std::min<int64_t>(m, x_.rows - 1) * groups, sums[m]);
  }

  void write(const Sums& sums, float* y) const {
    static_assert(M * R % 4 == 0);
    float all[M * R];
    for (int i = 0; i < M * R; i += 4) sum_four(&sums[0][0] + i, all + i);
    write(all, y);
  }

 private:
  HKI_ONCE void write(const float* all, float* y) const {
    for (int m = 0; m < M; ++m)
      for (int r = 0; r < R; ++r)
        if (m < x_.rows && first_ + r < w_.rows) y[m * w_.rows + first_ + r] = all[m * R + r];
  }

  const Weights& w_;
  const Activations& x_;
  int64_t first_;
  const float* x_rows_[M];
};

// Copies rows of x, each element where the value that it is multiplied with comes, with zeros where there
// are no codes. (And `kApart`: rows that are powers of two apart would share the nearest cache's few sets.)
template <Kind kind>
Activations arranged(const Weights& w, const Blocks& blocks, const Activations& x, float* memory) {
  const int64_t length = w.groups * blocks.size() * kCodes;
  const Activations out{memory, x.rows, length, length + kApart};
  for (int64_t m = 0; m < x.rows; ++m) {
    float* to = memory + m * out.stride;
    for (int64_t group = 0; group < w.groups; ++group)
      for (int64_t i = 0; i < blocks.size(); ++i, to += kCodes) {
        const int64_t first = group * w.group + blocks[i].first;
        const int64_t width = std::min<int64_t>(blocks[i].width, x.length - first);
        const float* from = x.data + m * x.stride + first;
        for (int64_t k = 0; k < kCodes; ++k) {
          const int64_t element = Decoder<kind>::element(k);
          to[k] = element < width ? from[element] : 0;
        }
      }
  }
  return out;
}

// The sums of each row of arranged x over each group, with zeros up to whole vectors.
void sum_groups(const Activations& x, int64_t groups, float* out) {
  const int64_t size = x.length / groups;
  for (int64_t m = 0; m < x.rows; ++m, out += round_up(groups, kLanes)) {
    std::fill_n(out, round_up(groups, kLanes), 0.0f);
    const float* row = x.data + m * x.stride;
    for (int64_t group = 0; group < groups; ++group, row += size) {
      Floats total = {};
      for (int64_t i = 0; i < size; i += kLanes) total += load<Floats>(row + i);
      out[group] = sum(total);
    }
  }
}

constexpr int64_t kUnpacked = 512;  // about so many codes of a row are put into bytes at a time

// How `few_rows` reads codes: 32 at each of so many places (`blocks`) of a group, `plane` codes apart.
struct OneByOne {  // a code in each byte
  using Found = Codes;
  static constexpr int blocks = 1, size = kCodes, bytes = kCodes;
  static void read(const uint8_t* p, int64_t, Codes* out) { out[0] = load<Codes>(p); }
};

// The same for integers with a sign, which are read where they are.
struct Signed : OneByOne {
  using Found = const uint8_t*;
  static void read(const uint8_t* p, int64_t, Found* out) { out[0] = p; }
};

// Codes with `low` bits in one plane and, if they have more, `high` bits in a second one. The last plane
// has `size` bytes, or whole vectors of them (`plane` bytes); the first one has `ratio` times as many.
template <int low, int high, int bytes_of_last>
struct InPlanes {
  using Found = Codes;
  static constexpr int last = high ? high : low, ratio = low / last, size = bytes_of_last;
  static constexpr int blocks = size * 8 / last / kCodes, bytes = size * (high ? 1 + ratio : 1);

  static void read(const uint8_t* p, int64_t plane, Codes* out) {
    HKI_UNROLL
    for (int i = 0; i < blocks; ++i) {
      if constexpr (size == kCodes) {
        out[i] = codes_in<low, kCodes>(p + i % ratio * plane, i / ratio);
        if (high) out[i] |= above(codes_in<last, kCodes>(p + ratio * plane, i));
      } else {
        constexpr int first = std::min(size * ratio, kCodes), vectors = size * ratio / first;
        out[i] = codes_in<low, first>(p + i % vectors * kCodes, i / vectors);
        if (high) out[i] |= above(codes_in<last, size>(p + ratio * size, i));
      }
    }
  }
  static Codes above(Codes codes) { return (Codes)((CodeWords)codes << (uint32_t)low); }
};

#if defined(HKI_AVX512)
// Each code of one plane in 32 bits, of which a table needs the lowest.
template <int bits, int bytes_of_last>
struct InWords {
  using Found = Indices;
  static constexpr int size = bytes_of_last, bytes = size, blocks = size * 8 / bits / kCodes;

  static void read(const uint8_t* p, int64_t, Indices* out) {
    const Ints first = words<bits, size>(p), second = size == kCodes ? words<bits, size>(p + 16) : first;
    HKI_UNROLL
    for (int i = 0; i < blocks; ++i) {
      const int step = size == kCodes ? i : 2 * i * 16 / size, next = size == kCodes ? 0 : 16 / size;
      out[i].of[0] = first >> step * bits;
      out[i].of[1] = second >> (step + next) * bits;
    }
  }
};
template <int low, int high, int size>
using ReadPlanes = std::conditional_t<high == 0, InWords<low, size>, InPlanes<low, high, size>>;
#else
template <int low, int high, int size>
using ReadPlanes = InPlanes<low, high, size>;
#endif

// y[:, first:last], decoded in registers: sums of products with codes, scaled once for each group, or
// (`exact`) sums of products with the values that the dense matrix has. (If codes are in several planes,
// or planes are small, they are first put into bytes, for some groups at a time.)
template <Kind kind, class Read, int M, int R, bool exact>
void few_rows(const Weights& w, const Blocks& blocks, const Activations& x, int64_t first,
              int64_t last, float* y) {
  // (Bytes behind those of a group may be 8-bit floats that are NaN.)
  const uint8_t bias = std::is_same_v<Read, Signed> ? w.bias : 0;
  const bool unpacked =
      std::is_base_of_v<OneByOne, Read> && (w.bits() < 8 || w.group % kCodes != 0 || bias);
  const int64_t group_bytes = w.stored / w.groups, groups = round_up(w.groups, kLanes);
  const int64_t in_group = blocks.size() * kCodes;
  const int64_t apart = Read::size < kCodes ? kCodes : in_group / Read::blocks;
  const int64_t some = unpacked ? std::max<int64_t>(1, kUnpacked / in_group) : w.groups;
  const int64_t ahead = std::max(kAhead, R * w.stored);
  Span span(w);
  float* sums_of_x = scratch(span.size() + groups * M + R * (w.padded() + some * in_group) / 4);
  span.place(sums_of_x + M * groups);  // (behind [M, groups])
  uint8_t* padded = reinterpret_cast<uint8_t*>(sums_of_x + M * groups + span.size());
  uint8_t* in_bytes = padded + R * w.padded();  // [R, some * in_group]
  if (w.offset.data && !exact) sum_groups(x, w.groups, sums_of_x);
  const Decoder<kind> decode(w);
  for (int64_t next = first; first < last; first += R) {
    if (first == next) span.read(first, last), next += span.rows();
    const Few<M, R> few(w, x, first);
    typename Few<M, R>::Sums total = {};
    const uint8_t *codes[R], *of_row[R];
    const float *scale[R], *offset[R];
    for (int r = 0; r < R; ++r) {
      of_row[r] = codes[r] = w.codes_of(few.row(r), padded + r * w.padded());
      scale[r] = span.scales(first + r), offset[r] = span.offsets(first + r);
    }
    const uint8_t* soon = w.codes + first * w.row_bytes() + ahead * w.step;  // R rows follow R rows
    for (int64_t group = 0, k = 0; group < w.groups; ++group, k += in_group) {
      if (unpacked && group % some == 0)
        for (int r = 0; r < R; ++r) {
          uint8_t* to = in_bytes + r * some * in_group;
          const uint8_t* from = of_row[r] + group * group_bytes;
          ask_for(from + ahead * w.step, some * group_bytes, 1);
          blocks.unpack(from, std::min(some, w.groups - group), to, bias);
          codes[r] = to - group * in_group;
        }
      typename Few<M, R>::Sums part = {};
      const int64_t at = group * (unpacked ? in_group : group_bytes);
      for (int64_t i = 0; i < apart; i += kCodes) {
        if (!unpacked) ask_for(soon, R * Read::bytes, w.step);
        soon += R * Read::bytes * w.step;
        HKI_UNROLL
        for (int r = 0; r < R; ++r) {
          typename Read::Found found[Read::blocks];
          Read::read(codes[r] + at + i, apart, found);
          HKI_UNROLL
          for (int p = 0; p < Read::blocks; ++p) {
            Floats values[kVectors];
            decode(found[p], values);
            for (int v = 0; exact && v < kVectors; ++v)
              values[v] = decode.exact(values[v], scale[r][group], offset[r][group]);
            few.add(exact ? total : part, r, values, k + i + p * apart);
          }
        }
      }
      if (exact) continue;
      for (int m = 0; m < M; ++m)
        for (int r = 0; r < R; ++r)
          total[m][r] += part[m][r] * decode.kUnit * scale[r][group];
    }
    if (w.offset.data && !exact) few.add_offsets(total, span, sums_of_x, groups);
    few.write(total, y);
  }
}

// How activations are arranged, and multiplied then.
struct FewRows {
  Activations (*arranged)(const Weights&, const Blocks&, const Activations&, float*);
  void (*multiply)(const Weights&, const Blocks&, const Activations&, int64_t, int64_t, float*);
};
template <Kind kind, class Read, int M, int R, bool exact>
constexpr FewRows kFewRows{arranged<kind>, few_rows<kind, Read, M, R, exact>};

// For up to M rows of x. Sums are scaled in place of values where there are fewer of them, and where they
// may be.
template <int M>
struct OfFewRows {
  static constexpr int R = std::clamp(kRegisters / 2 / M, 1, M <= 2 ? 4 : 2);
  template <bool exact>
  static constexpr FewRows of_bytes[] = {kFewRows<kTable16, OneByOne, M, R, exact>,
                                         kFewRows<kSigned, Signed, M, R, exact>,
                                         kFewRows<kUnsigned, OneByOne, M, R, exact>,
                                         kFewRows<kE4M3, OneByOne, M, R, exact>,
                                         kFewRows<kE5M2, OneByOne, M, R, exact>};

  static FewRows find(const Weights& w, Kind kind, const Activations& x) {
    if constexpr (M <= 2)
      if (w.rounding == kNone && x.moderate()) {
        const FewRows found = Table16(w.table, w.bits()).coarse() ? of_planes<kCoarse16>(w)
                              : w.nibbles()                       ? of_size<kTable16, 4, 0>(w)
                                                                  : FewRows{};
        return found.multiply ? found : of_bytes<false>[kind];
      }
    return of_bytes<true>[kind];
  }

  // None for planes that are read piece by piece.
  template <Kind kind>
  static FewRows of_planes(const Weights& w) {
    switch (10 * w.planes[0] + w.planes[1]) {
      case 10: return of_size<kind, 1, 0>(w);
      case 20: return of_size<kind, 2, 0>(w);
      case 21: return of_size<kind, 2, 1>(w);
      case 40: return of_size<kind, 4, 0>(w);
      case 41: return of_size<kSigned, 4, 1>(w);
      case 42: return of_size<kSigned, 4, 2>(w);
    }
    return {};
  }

  template <Kind kind, int low, int high>
  static FewRows of_size(const Weights& w) {
    constexpr int last = high ? high : low;
    const int64_t size = w.group * last / 8;
    if (size % 32 == 0) return in_planes<kind, low, high, 32>;
    if (size == 16) return in_planes<kind, low, high, 16>;
    if constexpr (last <= 2) if (size == 8) return in_planes<kind, low, high, 8>;
    if constexpr (last == 1) if (size == 4) return in_planes<kind, low, high, 4>;
    return {};
  }

  template <Kind kind, int low, int high, int size>
  static constexpr FewRows in_planes = kFewRows<kind, ReadPlanes<low, high, size>, M, R, false>;
};

constexpr int64_t kFew = 8;  // up to this many rows
constexpr int64_t kFewOfGroups = kLanes == 16 ? 4 : 2;  // if `decode_groups` serves codes of 4 bits

// --- one row of activations, as integers --------------------------------------------------------------

// y, for one row and codes of any table: activations become integers of 25 bits, values integers of 23. False if
// that does not serve, as with AVX-512, whose tables are of floats, and for tables with very small values.
bool by_table(const Weights& w, const Integers& integers, const Activations& x, float* y, Team team) {
#if defined(HKI_AVX2)
  FixedTable table;
  if (!RowInWords::fits(integers) || !table.set(w.table)) return false;
  RowInWords words(integers);
  words.place(scratch<1>(words.size()));
  words.round(x.data, table.unit);
  const auto part = integers.several       ? table_rows<4, true, false>
                    : integers.vectors == 1 ? table_rows<4, false, true>
                                            : table_rows<4, false, false>;
  team.parts(w.rows, 4, 384, [&](int64_t first, int64_t last) { part(table, words, first, last, y); });
  return true;
#else
  return false;
#endif
}

// The same for codes that stand for small integers: activations become integers of 23 bits and a scale for each
// group, or for each vector of a large one, which are multiplied byte by byte.
bool by_integers(const Weights& w, const Activations& x, float* y, Team team) {
#if defined(HKI_AVX512) || defined(HKI_AVX2)
  const bool few_bits = w.nibbles() || (w.planes[0] == 2 && w.planes[1] <= 1);
  if (x.rows != 1 || !few_bits || w.rounding != kNone || !x.moderate()) return false;
  Integers integers(w);
  if (!integers.set(w.table)) return w.nibbles() && by_table(w, integers, x, y, team);
  const Values values = integers.values();
  if (values == kAnyTable) return false;
  if (!(values == kThreeBits ? integers.set_planes() : integers.start_at_vectors())) return false;
  Rounded<3> rounded(integers, 1);
  rounded.place(scratch<1>(rounded.size()));
  integers.in_group > 1 ? round_vectors(integers, x.data, rounded)
                        : round_row(integers, x.data, 0, true, rounded);
  const auto part = values == kCounted     ? integer_rows<kCounted, 1, 4, 3, true>
                    : values == kTwoBits   ? integer_rows<kTwoBits, 1, 4, 3, true>
                    : values == kThreeBits ? integer_rows<kThreeBits, 1, 4, 3, true>
                                           : integer_rows<kSmallTable, 1, 4, 3, true>;
  team.parts(w.rows, 4, 384, [&](int64_t first, int64_t last) { part(integers, rounded, 0, first, last, y); });
  return true;
#else
  return false;
#endif
}

// --- many rows of activations --------------------------------------------------------------------

// out[r, v] (+)= sum over i < count of rows[r, i] * columns[i, v], for R rows and V vectors.
template <int R, int V>
void multiply(int64_t count, const float* rows, int64_t row_stride, const float* columns,
              int64_t column_stride, float* out, int64_t out_stride, bool add) {
  Floats total[R][V] = {};
  for (int64_t i = 0; i < count; ++i) {
    Floats column[V];
    for (int v = 0; v < V; ++v) column[v] = load<Floats>(columns + i * column_stride + v * kLanes);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) total[r][v] += rows[r * row_stride + i] * column[v];
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      float* at = out + r * out_stride + v * kLanes;
      store(at, add ? load<Floats>(at) + total[r][v] : total[r][v]);
    }
}

struct Tile {
  int rows, vectors;
  void (*multiply)(int64_t, const float*, int64_t, const float*, int64_t, float*, int64_t, bool);
};

template <int R, int V>
constexpr Tile kTile{R, V, multiply<R, V>};

// Tiles that fill the registers, of the fewest rows first, and before each a narrow one.
template <int R>
constexpr Tile kFull = kTile<R, std::min(8, kRegisters * 3 / 4 / R)>;
template <int R>
constexpr Tile kHalf = kTile<R, std::max(1, kFull<R>.vectors / 2)>;
constexpr Tile kTiles[] = {kHalf<1>, kFull<1>, kHalf<2>,        kFull<2>,
                           kHalf<4>, kFull<4>, kHalf<kTileRows>, kFull<kTileRows>};

// The smallest tile for so many rows and elements of them; what it lacks of the latter, others do.
const Tile& tile_for(int64_t rows, int64_t width) {
  const Tile* tile = kTiles;
  while (tile->rows < rows) ++tile;
  return tile->vectors * kLanes < width ? tile[1] : *tile;
}

constexpr int64_t kPanel = 2 * kLanes;  // columns that are packed together
constexpr int64_t kWidest = 8 * kLanes;  // the most columns of a tile
constexpr int64_t kDepth = kLanes == 8 ? 320 : 640;  // terms of a sum at a time: 20 KB of a narrow panel
constexpr int64_t kWhole = 128;         // larger groups may be divided between these
constexpr int64_t kBlock = 96;          // rows of the matrix that are decoded at a time
constexpr int64_t kMany = 512;          // rows of activations that they are decoded for
constexpr int64_t kNarrow = 512;        // elements of rows of the matrix that are decoded at a time

// out[j, i] = in[i, j] for i < rows, j < columns, of which `block` are taken at a time. Their rows of
// `out`, and four of `in`, should not share few sets of the nearest cache, as powers of two apart do.
void transpose(const float* in, int64_t in_stride, int64_t rows, int64_t columns, float* out,
               int64_t out_stride, int64_t block) {
  for (int64_t j0 = 0; j0 < columns; j0 += block) {
    const int64_t j1 = std::min(j0 + block, columns);
    int64_t i = 0;
#if defined(HKI_AVX512) || defined(HKI_AVX2)
    for (; i + 4 <= rows && j1 == j0 + block; i += 4)
      for (int64_t j = j0; j < j1; j += 4) {
        __m128 part[4];
        for (int n = 0; n < 4; ++n) part[n] = _mm_loadu_ps(in + (i + n) * in_stride + j);
        _MM_TRANSPOSE4_PS(part[0], part[1], part[2], part[3]);
        for (int n = 0; n < 4; ++n) _mm_storeu_ps(out + (j + n) * out_stride + i, part[n]);
      }
#endif
    for (; i < rows; ++i)
      for (int64_t j = j0; j < j1; ++j) out[j * out_stride + i] = in[i * in_stride + j];
  }
}

// Values [k, end) of rows [first, last), `stride` apart.
using DecodeRows = void (*)(const Weights&, const Blocks&, int64_t first, int64_t last, int64_t k,
                            int64_t end, float* out, int64_t stride);

template <Kind kind>
void decode_rows(const Weights& w, const Blocks& blocks, int64_t first, int64_t last, int64_t k, int64_t end,
                 float* out, int64_t stride) {
  for (; first < last; ++first, out += stride) decode_row<kind>(w, blocks, first, k, end, out);
}

// For whole groups, of codes that `Read` reads.
template <Kind kind, class Read>
void decode_groups(const Weights& w, const Blocks&, int64_t first, int64_t last, int64_t k, int64_t end,
                   float* out, int64_t stride) {
  const int64_t group_bytes = w.stored / w.groups, apart = w.group / Read::blocks;
  const int64_t ahead = 4 * w.row_bytes(), before = k / w.group, groups = end / w.group - before;
  const Decoder<kind> decode(w);
  float* memory = scratch<3>(2 * groups);
  const float* offsets = std::fill_n(memory + groups, groups, 0.0f) - groups;
  for (; first < last; ++first, out += stride) {
    const int64_t at = w.scales_before(first) + before;
    const float* scales = w.scale.floats(at, groups, memory);
    if (w.offset.data) offsets = w.offset.floats(at, groups, memory + groups);
    const uint8_t* codes = w.codes + first * w.row_bytes() + before * group_bytes;
    float* to = out;
    for (int64_t group = 0; group < groups; ++group, codes += group_bytes, to += w.group) {
      const Floats scale = Floats{} + scales[group], offset = Floats{} + offsets[group];
      for (int64_t i = 0; i < apart; i += kCodes) {
        __builtin_prefetch(codes + i + ahead);
        Codes found[Read::blocks];
        Read::read(codes + i, apart, found);
        HKI_UNROLL
        for (int p = 0; p < Read::blocks; ++p) {
          Floats values[kVectors];
          decode(decode.arranged(found[p]), values);
          HKI_UNROLL
          for (int v = 0; v < kVectors; ++v)
            store(to + i + p * apart + v * kLanes, values[v] * decode.kUnit * scale + offset);
        }
      }
    }
  }
}

constexpr DecodeRows kDecodeRows[] = {decode_rows<kTable16>, decode_rows<kSigned>, decode_rows<kUnsigned>,
                                      decode_rows<kE4M3>, decode_rows<kE5M2>};

// How to decode rows, in parts of so many columns.
DecodeRows decoder(const Weights& w, Kind kind, int64_t columns) {
  const bool whole = w.group % kCodes == 0 && w.group <= kWhole && columns % w.group == 0;
  if (!whole || w.rounding != kNone) return kDecodeRows[kind];
  if (kind == kSigned && w.bits() == 8) return decode_groups<kSigned, OneByOne>;
  if (!w.nibbles()) return kDecodeRows[kind];
  if (w.group == kCodes) return decode_groups<kTable16, InPlanes<4, 0, 16>>;
  return w.group % (2 * kCodes) ? kDecodeRows[kind] : decode_groups<kTable16, InPlanes<4, 0, 32>>;
}

// The transpose of some rows of x as panels [panel][k][kPanel], padded with zeros.
void pack_panel(const Activations& x, int64_t panel, float* packed) {
  const int64_t first = panel * kPanel, count = std::min(kPanel, x.rows - first);
  float* out = packed + first * x.length;
  if (count < kPanel) std::fill_n(out, kPanel * x.length, 0.0f);
  transpose(x.data + first * x.stride, x.stride, count, x.length, out, kPanel, 16);
}

// y[:, first:last] of the product along the groups: rows [first, last) of the matrix.
void many_along_groups(const Weights& w, const Blocks& blocks, Kind kind, const Activations& x,
                       const float* packed, int64_t first, int64_t last, float* y) {
  const int64_t parts = (w.length + kDepth - 1) / kDepth;
  const int64_t unit = w.group % kCodes || w.group > kWhole ? kCodes : w.group;
  const int64_t depth = round_up((w.length + parts - 1) / parts, unit), stride = depth + kLanes;
  const int64_t rows = round_up(last - first, kTileRows);  // those behind the last one do not matter
  const int64_t out_stride = round_up(x.rows, kPanel) + kLanes;
  float* values = scratch(rows * (stride + out_stride));
  float* out = values + rows * stride;  // [rows, x.rows]
  for (int64_t k = 0; k < w.length; k += depth) {
    const int64_t count = std::min(depth, w.length - k);
    decoder(w, kind, std::gcd(k, count))(w, blocks, first, last, k, k + count, values, stride);
    for (int64_t m = 0; m < x.rows; m += kPanel) {
      const Tile& tile = x.rows - m <= kLanes ? kTile<kTileRows, 1> : kTile<kTileRows, 2>;
      for (int64_t r = 0; r < rows; r += kTileRows)
        tile.multiply(count, values + r * stride, stride, packed + m * w.length + k * kPanel,
                      kPanel, out + r * out_stride + m, out_stride, k > 0);
    }
  }
  transpose(out, out_stride, last - first, x.rows, y + first, w.rows, 4);
}

// y[:, first:last] of the product along the rows: elements [first, last) of each row of the matrix.
void along_rows(const Weights& w, const Blocks& blocks, Kind kind, const Activations& x, int64_t first,
                int64_t last, float* y) {
  const DecodeRows decode = decoder(w, kind, std::gcd(first, last));
  const int64_t width = last - first, stride = round_up(width, kWidest) + kLanes;
  const int64_t depth = std::min(kBlock, w.rows), x_stride = depth + kLanes;
  float* values = scratch(depth * stride + kTileRows * (x_stride + kWidest));
  float* of_x = values + depth * stride;         // [kTileRows, depth]
  float* part = of_x + kTileRows * x_stride;  // [kTileRows, kWidest]
  for (int64_t i = 0; i < w.rows; i += depth) {
    const int64_t count = std::min(depth, w.rows - i);
    decode(w, blocks, i, i + count, first, last, values, stride);
    for (int64_t m = 0; m < x.rows; m += kTileRows) {
      const int64_t rows = std::min<int64_t>(kTileRows, x.rows - m);
      const Tile& tile = tile_for(rows, width);
      for (int64_t r = 0; r < rows; ++r)
        std::copy_n(x.data + (m + r) * x.stride + i, count, of_x + r * x_stride);
      for (int64_t k = 0; k < width; k += tile.vectors * kLanes) {
        const int64_t columns = std::min<int64_t>(tile.vectors * kLanes, width - k);
        float* out = y + m * w.length + first + k;
        if (rows == tile.rows && columns == tile.vectors * kLanes) {
          tile.multiply(count, of_x, x_stride, values + k, stride, out, w.length, i > 0);
          continue;
        }
        tile.multiply(count, of_x, x_stride, values + k, stride, part, kWidest, false);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t j = 0; j < columns; ++j)
            out[r * w.length + j] = part[r * kWidest + j] + (i ? out[r * w.length + j] : 0);
      }
    }
  }
}

// --- few rows of activations, along short rows of the matrix ----------------------------------------

constexpr int64_t kShort = 256;  // bytes of codes; attention multiplies caches so, each row a position
constexpr int kSome = 4;         // rows of activations that are multiplied together
constexpr int kRowsAhead = 24;   // so many rows before they are read, codes are asked for

// out[:, :] of the product with rows [first, last) of the matrix.
template <Kind kind>
void short_rows(const Weights& w, const Blocks& blocks, const Activations& x, int64_t first,
                int64_t last, float* out) {
  const int64_t group_bytes = w.stored / w.groups, count = w.groups * blocks.size();
  uint8_t* padded = reinterpret_cast<uint8_t*>(scratch(w.padded() / 4));
  const Decoder<kind> decode(w);
  for (int64_t m0 = 0; m0 < x.rows; m0 += kSome)
    for (int64_t i = 0; i < count; ++i) {
      const float* of_x[kSome];
      for (int m = 0; m < kSome; ++m) of_x[m] = x.data + std::min(m0 + m, x.rows - 1) * x.stride;
      const int64_t group = i / blocks.size();
      const Block& block = blocks[i % blocks.size()];
      Floats total[kSome][kVectors] = {};
      for (int64_t row = first; row < last; ++row) {
        const uint8_t* codes = w.codes_of(row, padded) + group * group_bytes;
        __builtin_prefetch(codes + block.at[0] + kRowsAhead * w.row_bytes());
        const float scale = w.scale_at(row, group), offset = w.offset_at(row, group);
        Floats values[kVectors];
        decode(blocks.codes(codes, block), values);
        for (int v = 0; v < kVectors; ++v) {
          const Floats value = values[v] * decode.kUnit * scale + offset;
          for (int m = 0; m < kSome; ++m) total[m][v] += value * of_x[m][row];
        }
      }
      const int64_t begin = group * w.group + block.first;
      const int64_t width = std::min<int64_t>(block.width, w.length - begin);
      for (int m = 0; m < kSome && m0 + m < x.rows; ++m) {
        float all[kCodes];
        std::memcpy(all, total[m], sizeof(all));
        for (int k = 0; k < kCodes; ++k)
          if (decode.element(k) < width)
            out[(m0 + m) * w.length + begin + decode.element(k)] = all[k];
      }
    }
}

using ShortRows = void (*)(const Weights&, const Blocks&, const Activations&, int64_t, int64_t,
                           float*);
constexpr ShortRows kShortRows[] = {short_rows<kTable16>, short_rows<kSigned>, short_rows<kUnsigned>,
                                    short_rows<kE4M3>, short_rows<kE5M2>};

// y, the sum of what some of the rows give at a time.
void along_short_rows(const Weights& w, const Blocks& blocks, Kind kind, const Activations& x,
                      float* y, Team team) {
  const int64_t parts = team.threads, size = x.rows * w.length;
  float* sums = scratch<1>(parts * size);
  team.each(parts, [&](int64_t i) {
    kShortRows[kind](w, blocks, x, i * w.rows / parts, (i + 1) * w.rows / parts, sums + i * size);
  });
  for (int64_t i = 0; i < size; ++i) {
    y[i] = 0;
    for (int64_t part = 0; part < parts; ++part) y[i] += sums[part * size + i];
  }
}

// --- the whole -----------------------------------------------------------------------------------

// Up to how many rows of x are few. (Small matrices of a batch have threads of their own.)
int64_t few(const Weights& w, Kind kind, bool along) {
  if (along || !w.nibbles() || w.rows * w.length < kWorthWaking) return kFew;
  return decoder(w, kind, w.group) == kDecodeRows[kind] ? kFew : kFewOfGroups;
}

void matmul(const Weights& w, const Blocks& blocks, Kind kind, bool along, const Activations& x,
            float* packed, float* y, Team team) {
  if (along && x.rows <= kFew && w.stored <= kShort && w.rounding == kNone) {
    along_short_rows(w, blocks, kind, x, y, team);
  } else if (along && w.length <= kNarrow && x.rows > w.length) {
    team.parts(x.rows, kTileRows, kNarrow / kTileRows * kTileRows, [&](int64_t first, int64_t last) {
      const Activations some{x.data + first * x.stride, last - first, x.length, x.stride};
      along_rows(w, blocks, kind, some, 0, w.length, y + first * w.length);
    });
  } else if (along) {
    team.parts(w.length, kWidest, kNarrow, [&](int64_t first, int64_t last) {
      along_rows(w, blocks, kind, x, first, last, y);
    });
  } else if (by_integers(w, x, y, team)) {
  } else if (x.rows <= few(w, kind, along)) {
    const int64_t size = x.rows * (w.groups * blocks.size() * kCodes + kApart);
    const FewRows how = x.rows == 1   ? OfFewRows<1>::find(w, kind, x)
                        : x.rows == 2 ? OfFewRows<2>::find(w, kind, x)
                        : x.rows <= 4 ? OfFewRows<4>::find(w, kind, x)
                                      : OfFewRows<8>::find(w, kind, x);
    const Activations in_order = how.arranged(w, blocks, x, scratch<1>(size));
    team.parts(w.rows, 4, 384, [&](int64_t first, int64_t last) {
      how.multiply(w, blocks, in_order, first, last, y);
    });
  } else {
    for (int64_t m = 0; m < x.rows; m += kMany) {
      Activations block{x.data + m * x.stride, std::min(kMany, x.rows - m), x.length, x.stride};
      team.each((block.rows + kPanel - 1) / kPanel,
                [&](int64_t panel) { pack_panel(block, panel, packed); });
      team.parts(w.rows, kTileRows, kBlock, [&](int64_t first, int64_t last) {
        many_along_groups(w, blocks, kind, block, packed, first, last, y + m * w.rows);
      });
    }
  }
}

// Operands: x [batch, m, rows or length], codes [..., stored], scale and offset (empty where there is
// none) [..., groups], of which `order` says what the axes are. Results: y [batch, m, length or rows], and
// memory for the transpose of `kMany` rows of x, for products of more than two along the groups.
void handle(const Call& call) {
  const Array x = call.operand(0), codes = call.operand(1), scale = call.operand(2);
  const Array offset = call.operand(3), y = call.result(0), packed = call.result(1);
  const bool along_rows = call.number<bool>("along_rows");
  const auto kind = static_cast<Kind>(call.number<int64_t>("kind"));
  const int64_t batch = x.shape[0], m = x.shape[1], in = x.shape[2], out = y.shape[2];
  const Layout layout{codes.shape, call.list<int64_t>("order")};
  Weights w(codes, scale, layout, call.list<int64_t>("planes"));
  w.length = along_rows ? out : in;
  w.table = call.list<float>("table").data;
  w.bias = call.number<int64_t>("bias");
  w.rounding = static_cast<Rounding>(call.number<int64_t>("rounding"));
  const Blocks blocks(w);
  const int64_t products = w.rows * w.length * m;
  over_batch(batch, products, call.threads(), m <= few(w, kind, along_rows), [&](int64_t b, Team team) {
    const Activations rows{x.floats() + b * m * in, m, in, in};
    matmul(w.from(layout.first(b), scale, offset), blocks, kind, along_rows, rows, packed.floats(),
           y.floats() + b * m * out, team);
  });
}

}  // namespace

HKI_DEFINE_HANDLER(QuantizedMatmul, handle)
