// Products of activations that are rounded to 8 bits with a matrix that is stored as codes and scales.
//
//   y[m, row] = sum over k of x[m, k] * W[row, k]
//
// where W is as in quantized_matmul.cc, and each row of x (or each part of it that meets a group) has a
// scale of its own. Codes of W are bytes without a sign, or become such: what they have too much
// (`bias`) is where integer sums start. These are exact; a group's sum is scaled once.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "integer_tiles.h"
#include "integers.h"

namespace {

// --- activations ---------------------------------------------------------------------------------

// Rows of activations, rounded. Where they have no codes of the matrix beside them, they are zero.
struct Rounded {
  int64_t rows, row_codes, row_starts, row_sums;
  int8_t* codes;   // [rows, pieces, vectors, parts, kWide]
  int32_t* start;  // [rows, starts, kLanes]: the sums of codes times what values have too much, negative
  float* scale;    // [rows, starts, kLanes]
  float* sums;     // [rows, groups up to whole vectors]: of the values

  Rounded(const Integers& w, int64_t rows)
      : rows(rows),
        row_codes(w.pieces * w.vectors * w.parts * kWide),
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
HKI_INLINE void spread(const Integers& w, const int8_t* flat, int64_t size, int8_t* codes) {
  for (int64_t i = 0; i < w.w.groups; ++i)
    for (int64_t part = 0; part < w.parts; ++part)
      for (int64_t at = 0; at < size; at += kWide) {
        const int64_t byte = w.several ? i * size : i * w.vectors * kWide + at;
        std::memcpy(codes + (byte / kWide * w.parts + part) * kWide + byte % kWide,
                    flat + i * w.w.group + part * size + at, std::min(kWide, size - at));
      }
}

void round_row(const Integers& w, const float* x, int64_t row, bool in_groups, const Rounded& out) {
  const int64_t groups = w.w.groups, starts = w.starts, each = out.row_codes / starts;
  const int64_t in_start = w.in_start, lanes = kLanes / in_start;
  float* scales = scratch(groups + kLanes + groups * w.w.group / 4 + 1);
  int8_t* flat = reinterpret_cast<int8_t*>(scales + groups + kLanes);
  std::fill_n(scales + groups, kLanes, 0.0f);
  round_parts(w, x, in_groups, scales, flat);
  int8_t* codes = out.codes + row * out.row_codes;
  std::fill_n(codes, out.row_codes, 0);
  constexpr int64_t kUsual = 16;
  w.group_bytes == kUsual ? spread(w, flat, kUsual, codes) : spread(w, flat, w.group_bytes, codes);
  const Ints of_lane = w.of_lanes();
  float* sums = out.sums + row * out.row_sums;
  std::fill_n(sums, out.row_sums, 0.0f);
  for (int64_t i = 0; i < starts; ++i) {
    Ints start = {};
    for (int64_t at = 0; at < each; at += kWide)
      start = add_products(start, Wide{} + 1, load<Wide>(codes + i * each + at));
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

// y[m0:m0+M, first:last]; rows that there are not are others, and not written.
template <Values how, int M, int R>
void integer_rows(const Integers& integers, const Rounded& x, int64_t m0, int64_t first,
                  int64_t last, float* y) {
  const Weights& w = integers.w;
  const bool several = integers.several;
  const int64_t starts = integers.starts, size = integers.group_bytes;
  const int64_t vectors = several ? 1 : integers.vectors;  // of a start; and its bytes and groups
  const int64_t bytes = several ? kWide : size, groups = integers.in_start;
  constexpr int P = how == kBytes ? 1 : 2;
  const int64_t ahead = std::max(kAhead, R * w.stored);
  Span span(w);
  float* memory = scratch(span.size() + R * w.padded() / 4);
  span.place(memory);
  uint8_t* padded = reinterpret_cast<uint8_t*>(memory + span.size());
  const Ints of_lane = integers.of_lanes();
  Ints of_last;  // for the last start
  for (int i = 0; i < kLanes; ++i)
    of_last[i] = std::min<int64_t>(of_lane[i], w.groups - 1 - (starts - 1) * groups);
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
  for (const int64_t begin = first; first < last; first += R) {
    if ((first - begin) % span.rows() == 0) span.read(first, last);
    Floats total[M][R] = {};
    const uint8_t* codes[R];
    for (int r = 0; r < R; ++r)
      codes[r] = w.codes_of(std::min(first + r, w.rows - 1), padded + r * w.padded());
    const float* scales = span.scales(first);
    const uint8_t* soon = w.codes + first * w.row_bytes() + ahead * w.step;  // R rows follow R rows
    for (int64_t i = 0, at_x = 0; i < starts; ++i) {
      Ints sums[M][R];
      HKI_UNROLL
      for (int m = 0; m < M; ++m)
        HKI_UNROLL
        for (int r = 0; r < R; ++r) sums[m][r] = load<Ints>(start[m] + i * kLanes);
      for (int64_t v = 0; v < vectors; ++v, at_x += P * kWide) {
        HKI_UNROLL
        for (int r = 0; r < R; ++r) {
          Wide values[P];
          integers.read<how>(codes[r] + i * bytes + v * kWide, values);
          if (r * kWide % 64 == 0) __builtin_prefetch(soon + r * kWide * w.step, 0, 2);
          HKI_UNROLL
          for (int m = 0; m < M; ++m) {
            Wide of_x[P];
            for (int p = 0; p < P; ++p) of_x[p] = load<Wide>(codes_of_x[m] + at_x + p * kWide);
            if constexpr (how == kCounted || how == kSmallTable)
              sums[m][r] = add_small_products(sums[m][r], values, of_x);
            else
              for (int p = 0; p < P; ++p) sums[m][r] = add_products(sums[m][r], values[p], of_x[p]);
          }
        }
        soon += R * kWide * w.step;
      }
      const Ints of = i + 1 < starts ? of_lane : of_last;
      HKI_UNROLL
      for (int r = 0; r < R; ++r) {
        const Floats scale = permuted(load<Floats>(scales + r * w.groups + i * groups), of);
        HKI_UNROLL
        for (int m = 0; m < M; ++m)
          total[m][r] += __builtin_convertvector(sums[m][r], Floats) *
                         (scale * load<Floats>(scale_of_x[m] + i * kLanes));
      }
    }
    if (w.offset.data) {
      HKI_UNROLL
      for (int m = 0; m < M; ++m)
        HKI_UNROLL
        for (int r = 0; r < R; ++r) total[m][r] += span.offset(first + r, sums_of_x[m]);
    }
    float all[M * R];
    for (int i = 0; i < M * R; i += 4) sum_four(&total[0][0] + i, all + i);
    for (int m = 0; m < M && m0 + m < x.rows; ++m)
      for (int r = 0; r < R && first + r < last; ++r)
        y[(m0 + m) * w.rows + first + r] = all[m * R + r];
  }
}

// --- the whole -----------------------------------------------------------------------------------

constexpr int64_t kFewest = 8;  // more rows of x are multiplied by tiles, if codes are small enough
constexpr int64_t kInCache = 1 << 17;  // so many bytes of codes stay near while rows of x pass by

using IntegerRows = void (*)(const Integers&, const Rounded&, int64_t, int64_t, int64_t, float*);

// y[:, first:last].
template <Values how>
void integer_part(const Integers& w, const Rounded& x, int64_t first, int64_t last, float* y) {
  for (int64_t m = 0, left = x.rows; left > 0; m += 8, left -= 8) {
    const IntegerRows some = left == 1   ? integer_rows<how, 1, 4>
                             : left == 2 ? integer_rows<how, 2, 4>
                             : left <= 4 ? integer_rows<how, 4, kRegisters / 8>
                                         : integer_rows<how, 8, 2>;
    some(w, x, m, first, last, y);
  }
}

// Operands: x [batch, m, length], codes [..., stored], scale and offset (empty where there is none)
// [..., groups], of which `order` says what the axes are. Result: [batch, m, rows]. `table` has the
// values of codes of four bits, or of eight what is added to them to have no sign; values are these,
// less `bias`, times `unit`.
void handle(const Call& call) {
  const Array x = call.operand(0), codes = call.operand(1), scale = call.operand(2);
  const Array offset = call.operand(3), y = call.result(0);
  const int64_t batch = x.shape[0], m = x.shape[1], length = x.shape[2];
  const Layout layout{codes.shape, call.list<int64_t>("order")};
  Weights weights(codes, scale, layout, call.list<int64_t>("planes"));
  weights.length = length;
  const List<int64_t> table = call.list<int64_t>("table");
  Integers w{weights};
  for (int i = 0; i < kWide; ++i) w.table[i] = table[i & (table.size - 1)];  // 1 or 16 of them
  w.largest = weights.nibbles() ? *std::max_element(table.data, table.data + table.size) : 255;
  w.bias = call.number<int64_t>("bias");
  w.unit = call.number<float>("unit");
  w.flipped = table[0];
  const bool in_groups = call.number<bool>("in_groups");
  const Values values = w.values();
  const int64_t products = weights.rows * length * m / 4;  // (fast ones)
  over_batch(batch, products, call.threads(), true, [&](int64_t b, Team team) {
    Integers one = w;
    one.w = weights.from(layout.first(b), scale, offset);
    float* out = y.floats() + b * m * weights.rows;
    if (m > kFewest && one.largest <= kLargestTiled)
      return by_tiles(one, x.floats() + b * m * length, m, in_groups, out, team);
    Rounded rounded(one, m);
    rounded.place(scratch<1>(rounded.size()));
    team.each(m, [&](int64_t row) {
      round_row(one, x.floats() + (b * m + row) * length, row, in_groups, rounded);
    });
    const int64_t size = std::clamp<int64_t>(kInCache / weights.stored / 4 * 4, 4, 384);
    team.parts(weights.rows, 4, size, [&](int64_t first, int64_t last) {
      const auto part = values == kBytes        ? integer_part<kBytes>
                        : values == kCounted    ? integer_part<kCounted>
                        : values == kSmallTable ? integer_part<kSmallTable>
                                                : integer_part<kAnyTable>;
      part(one, rounded, first, last, out);
    });
  });
}

}  // namespace

HKI_DEFINE_HANDLER(IntegerMatmul, handle)

// The largest code for which many rows of x in small groups are multiplied as integers fastest.
extern "C" int64_t LargestTiled() { return kLargestTiled; }
