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

#include "integer_rows.h"
#include "integer_tiles.h"
#include "integers.h"

namespace {

// --- the whole -----------------------------------------------------------------------------------

constexpr int64_t kFewest = 8;  // more rows of x are multiplied by tiles, if codes are small enough
constexpr int64_t kInCache = 1 << 17;  // so many bytes of codes stay near while rows of x pass by

using IntegerRows = void (*)(const Integers&, const Rounded<1>&, int64_t, int64_t, int64_t, float*);

// y[:, first:last].
template <Values how>
void integer_part(const Integers& w, const Rounded<1>& x, int64_t first, int64_t last, float* y) {
  for (int64_t m = 0, left = x.rows; left > 0; m += 8, left -= 8) {
    const bool single = w.starts_are_vectors();
    const IntegerRows some = left == 1   ? single ? integer_rows<how, 1, 4, 1, true>
                                                  : integer_rows<how, 1, 4, 1, false>
                             : left == 2 ? integer_rows<how, 2, 4, 1, false>
                             : left <= 4 ? integer_rows<how, 4, kRegisters / 8, 1, false>
                                         : integer_rows<how, 8, 2, 1, false>;
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
  const bool in_groups = call.number<bool>("in_groups");
  const Values values = w.values();
  const int64_t products = weights.rows * length * m / 4;  // (fast ones)
  over_batch(batch, products, call.threads(), true, [&](int64_t b, Team team) {
    Integers one = w;
    one.w = weights.from(layout.first(b), scale, offset);
    float* out = y.floats() + b * m * weights.rows;
    if (m > kFewest && one.largest <= kLargestTiled)
      return by_tiles(one, x.floats() + b * m * length, m, in_groups, out, team);
    Rounded<1> rounded(one, m);
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
