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
        row_codes(w.pieces() * w.vectors() * w.parts() * kWide),
        row_starts(w.starts() * kLanes),
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

void round_row(const Integers& w, const float* x, int64_t row, bool in_groups, const Rounded& out) {
  const int64_t size = w.group_bytes(), groups = w.w.groups, group = w.w.group;
  float* scales = scratch(groups + groups * group / 4 + 1);
  int8_t* flat = reinterpret_cast<int8_t*>(scales + groups);
  round_parts(w, x, in_groups, scales, flat);
  int8_t* codes = out.codes + row * out.row_codes;
  std::fill_n(codes, out.row_codes, 0);
  for (int64_t i = 0; i < groups; ++i)
    for (int64_t part = 0; part < w.parts(); ++part)
      for (int64_t at = 0; at < size; at += kWide) {
        const int64_t byte = w.several() ? i * size : i * w.vectors() * kWide + at;
        std::copy_n(flat + i * group + part * size + at, std::min(kWide, size - at),
                    codes + (byte / kWide * w.parts() + part) * kWide + byte % kWide);
      }
  const int64_t each = out.row_codes / w.starts();
  for (int64_t i = 0; i < w.starts(); ++i) {
    Ints start = {};
    Floats scale = {};
    for (int64_t at = 0; at < each; at += kWide)
      start = add_products(start, Wide{} + 1, load<Wide>(codes + i * each + at));
    start *= -w.bias;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t of = w.several() ? (i * kWide + 4 * lane) / size : i;
      scale[lane] = of < groups ? scales[of] * w.unit : 0;
    }
    std::memcpy(out.start + row * out.row_starts + i * kLanes, &start, sizeof(start));
    store(out.scale + row * out.row_starts + i * kLanes, scale);
  }
  float* sums = out.sums + row * out.row_sums;
  std::fill_n(sums, out.row_sums, 0.0f);
  for (int64_t i = 0; w.w.offset.data && i < groups; ++i) {
    int32_t sum = 0;
    for (int64_t k = 0; k < group; ++k) sum += flat[i * group + k];
    sums[i] = sum * scales[i];
  }
}

// --- products ------------------------------------------------------------------------------------

// y[m0:m0+M, first:last]; rows that there are not are others, and not written.
template <bool nibbles, bool small, int M, int R>
void integer_rows(const Integers& integers, const Rounded& x, int64_t m0, int64_t first,
                  int64_t last, float* y) {
  const Weights& w = integers.w;
  const bool several = integers.several();
  const int64_t groups = round_up(w.groups, kLanes) + kLanes, vectors = integers.vectors();
  const int64_t size = integers.group_bytes(), in_vector = several ? kWide / size : 1;
  constexpr int P = nibbles ? 2 : 1;
  const int64_t ahead = std::max(kAhead, R * w.stored);
  float* scales = scratch(2 * R * groups);
  float* offsets = scales + R * groups;
  Ints of_lane;
  for (int i = 0; i < kLanes; ++i) of_lane[i] = several ? 4 * i / size : 0;
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
  for (; first < last; first += R) {
    Floats total[M][R] = {};
    const uint8_t* codes[R];
    const int64_t soon = w.scales_before(first + 8 * R);
    w.scale.prefetch(soon, R * w.groups);
    if (w.offset.data) w.offset.prefetch(soon, R * w.groups);
    for (int r = 0; r < R; ++r) {
      const int64_t row = std::min(first + r, w.rows - 1);
      codes[r] = w.codes + row * w.row_bytes();
      const int64_t at = w.scales_before(row);
      w.scale.read(at, w.groups, scales + r * groups);
      if (w.offset.data) w.offset.read(at, w.groups, offsets + r * groups);
    }
    const auto add = [&](Ints (&sums)[M][R], int64_t byte, int64_t v) {
      Wide values[R][P];
      for (int r = 0; r < R; ++r) {
        integers.values<nibbles>(codes[r] + byte, values[r]);
        ask_for(codes[0] + (R * byte + r * kWide + ahead) * w.step, 1, 1);  // R rows follow R
      }
      for (int m = 0; m < M; ++m) {
        Wide of_x[P];
        for (int p = 0; p < P; ++p) of_x[p] = load<Wide>(codes_of_x[m] + (v * P + p) * kWide);
        for (int r = 0; r < R; ++r)
          if constexpr (small)
            sums[m][r] = add_small_products(sums[m][r], values[r], of_x);
          else
            for (int p = 0; p < P; ++p) sums[m][r] = add_products(sums[m][r], values[r][p], of_x[p]);
      }
    };
    const auto begin = [&](Ints (&sums)[M][R], int64_t i) {
      for (int m = 0; m < M; ++m)
        for (int r = 0; r < R; ++r) sums[m][r] = load<Ints>(start[m] + i * kLanes);
    };
    const auto end = [&](const Ints (&sums)[M][R], const Floats (&scale)[R], int64_t i) {
      for (int m = 0; m < M; ++m) {
        const Floats of_x = load<Floats>(scale_of_x[m] + i * kLanes);
        for (int r = 0; r < R; ++r)
          total[m][r] += __builtin_convertvector(sums[m][r], Floats) * (scale[r] * of_x);
      }
    };
    if (several) {
      for (int64_t v = 0; v < vectors; ++v) {
        Ints sums[M][R];
        Floats scale[R];
        begin(sums, v);
        add(sums, v * kWide, v);
        for (int r = 0; r < R; ++r)
          scale[r] = permuted(load<Floats>(scales + r * groups + v * in_vector), of_lane);
        end(sums, scale, v);
      }
    } else {
      for (int64_t group = 0; group < w.groups; ++group) {
        Ints sums[M][R];
        Floats scale[R];
        begin(sums, group);
        for (int64_t i = 0; i < vectors; ++i)
          add(sums, group * size + i * kWide, group * vectors + i);
        for (int r = 0; r < R; ++r) scale[r] = Floats{} + scales[r * groups + group];
        end(sums, scale, group);
      }
    }
    for (int m = 0; m < M && w.offset.data; ++m)
      for (int r = 0; r < R; ++r)
        for (int64_t i = 0; i < w.groups; i += kLanes)
          total[m][r] += load<Floats>(offsets + r * groups + i) * load<Floats>(sums_of_x[m] + i);
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
template <bool nibbles, bool small>
void integer_part(const Integers& w, const Rounded& x, int64_t first, int64_t last, float* y) {
  for (int64_t m = 0, left = x.rows; left > 0; m += 8, left -= 8) {
    const IntegerRows some = left == 1   ? integer_rows<nibbles, small, 1, 4>
                             : left == 2 ? integer_rows<nibbles, small, 2, 4>
                             : left <= 4 ? integer_rows<nibbles, small, 4, 4>
                                         : integer_rows<nibbles, small, 8, 2>;
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
  for (int i = 0; i < kWide; ++i) w.table[i] = table[i % table.size];
  w.largest = weights.nibbles() ? *std::max_element(table.data, table.data + table.size) : 255;
  w.bias = call.number<int64_t>("bias");
  w.unit = call.number<float>("unit");
  const bool in_groups = call.number<bool>("in_groups");
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
      const auto part = !weights.nibbles()      ? integer_part<false, false>
                        : one.largest <= kSmall ? integer_part<true, true>
                                                : integer_part<true, false>;
      part(one, rounded, first, last, out);
    });
  });
}

}  // namespace

HKI_DEFINE_HANDLER(IntegerMatmul, handle)

// The largest code for which many rows of x in small groups are multiplied as integers fastest.
extern "C" int64_t LargestTiled() { return kLargestTiled; }
