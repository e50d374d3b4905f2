// Trellis codes, which `types/trellis.py` defines. The encoder finds the codes of least squared error for
// each row of each sequence by Viterbi's algorithm, and feeds errors back to rows that are not encoded yet
// (LDLQ).

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "call.h"
#include "threads.h"
#include "trellis.h"

namespace {

constexpr int64_t kOverlap = 64;  // steps on each side of the ends, to find how they meet
constexpr int64_t kRows = 32;     // rows that are encoded before the others take up their errors

// Finds codes of `bits` for each number. A state is the window of the 12 bits from a number's first on;
// the lowest come first. So a state `s` is followed by `s >> bits | new << (12 - bits)`.
template <int bits>
class Encoder {
  static constexpr int kBranches = 1 << bits;
  static constexpr int kShared = kStates >> bits;         // states, less the bits that are shifted in
  static constexpr int kQuarter = kShared >> bits;

 public:
  Encoder() {
    for (int s = 0; s < kStates; ++s) {
      values_[s] = value_of<bits>(s);
      const int branch = s / kShared, rest = s % kShared;
      ordered_[((rest % kBranches) * kBranches + branch) * kQuarter + rest / kBranches] = values_[s];
    }
  }

  // The codes of `length` numbers, whose end meets their beginning, and the values of the codes.
  void encode(const float* w, int64_t length, uint16_t* words, float* found) {
    // How the ends meet, as if numbers farther away did not matter.
    const int64_t near = std::min(kOverlap, length / 2);
    costs_.resize((length + 1) * kShared);
    around_.assign(w + length - near, w + length);
    around_.insert(around_.end(), w, w + near);
    std::fill_n(costs(2 * near), kShared, 0.0f);
    backward(around_.data(), 2 * near);
    int shared = std::min_element(costs(0), costs(0) + kShared) - costs(0);
    for (int64_t t = 0; t < near; ++t) shared = state(around_[t], t, shared) >> bits;

    std::fill_n(costs(length), kShared, std::numeric_limits<float>::infinity());
    costs(length)[shared] = 0;
    backward(w, length);
    std::memset(words, 0, length * bits / 8);
    for (int64_t t = 0; t < length; ++t) {
      const int s = state(w[t], t, shared);
      found[t] = values_[s];
      put(words, t * bits, s & (kBranches - 1));
      shared = s >> bits;
    }
  }

 private:
  // The least costs from step `t` on, by the bits that its state shares with the one before.
  float* costs(int64_t t) { return costs_.data() + t * kShared; }

  void backward(const float* w, int64_t length) {
    for (int64_t t = length - 1; t >= 0; --t) step(w[t], costs(t + 1), costs(t));
  }

  void step(float w, const float* __restrict after, float* __restrict before) {
    alignas(64) float least[kBranches][kQuarter];
    for (int low = 0; low < kBranches; ++low) {
      const float* __restrict v = ordered_ + low * kBranches * kQuarter;
      for (int q = 0; q < kQuarter; ++q) {
        float best = std::numeric_limits<float>::infinity();
        for (int n = 0; n < kBranches; ++n) {
          const float error = v[n * kQuarter + q] - w;
          const float cost = error * error + after[n * kQuarter + q];
          best = cost < best ? cost : best;
        }
        least[low][q] = best;
      }
    }
    for (int q = 0; q < kQuarter; ++q)
      for (int low = 0; low < kBranches; ++low) before[q * kBranches + low] = least[low][q];
  }

  // The best state at step `t` that has these bits in common with the one before.
  int state(float w, int64_t t, int shared) {
    int best = shared;
    float least = std::numeric_limits<float>::infinity();
    for (int n = 0; n < kBranches; ++n) {
      const int s = shared + n * kShared;
      const float error = values_[s] - w;
      const float cost = error * error + costs(t + 1)[s >> bits];
      if (cost < least) least = cost, best = s;
    }
    return best;
  }

  static void put(uint16_t* words, int64_t at, uint32_t code) {
    words[at / 16] |= code << at % 16;
    if (at % 16 + bits > 16) words[at / 16 + 1] |= code >> (16 - at % 16);
  }

  alignas(64) float values_[kStates];
  alignas(64) float ordered_[kStates];
  std::vector<float> costs_, around_;
};

// One sequence of each row of a matrix.
struct Columns {
  const float* w;       // the first row's
  const float* factor;  // [rows, rows], or null: rows do not take up errors
  uint16_t* words;
  int64_t rows, length, stride, words_stride;
};

// Encodes rows in their order. Each leaves its error to the next ones, by a row of the factor.
template <int bits>
void encode(const Columns& c) {
  const auto encoder = std::make_unique<Encoder<bits>>();
  const int64_t n = c.length;
  std::vector<float> left(c.rows * n), found(n), errors(kRows * n);
  for (int64_t i = 0; i < c.rows; ++i) std::copy_n(c.w + i * c.stride, n, left.data() + i * n);
  const auto take_up = [&](int64_t r, int64_t first, int64_t last) {
    float* __restrict own = left.data() + r * n;
    for (int64_t i = first; i < last; ++i) {
      const float* __restrict error = errors.data() + i % kRows * n;
      const float factor = c.factor[i * c.rows + r];
      for (int64_t j = 0; j < n; ++j) own[j] -= factor * error[j];
    }
  };
  for (int64_t first = 0; first < c.rows; first += kRows) {
    const int64_t last = std::min(first + kRows, c.rows);
    for (int64_t i = first; i < last; ++i) {
      if (c.factor) take_up(i, first, i);
      const float* own = left.data() + i * n;
      encoder->encode(own, n, c.words + i * c.words_stride, found.data());
      if (!c.factor) continue;
      const float inverse = 1 / c.factor[i * c.rows + i];
      for (int64_t j = 0; j < n; ++j) errors[i % kRows * n + j] = (own[j] - found[j]) * inverse;
    }
    if (c.factor)
      for (int64_t r = last; r < c.rows; ++r) take_up(r, first, last);
  }
}

void trellis_encode(const Call& call) {
  const Array w = call.operand(0), factor = call.operand(1), words = call.result(0);
  const int64_t bits = call.number<int64_t>("bits"), length = call.number<int64_t>("steps");
  const int64_t columns = w.shape.back(), rows = w.shape[w.shape.size - 2];
  const int64_t batch = w.size() / std::max<int64_t>(1, rows * columns), count = columns / length;
  const auto run = bits == 2 ? encode<2> : bits == 3 ? encode<3> : encode<4>;
  const int64_t stride = columns * bits / 16;
  const Team team = worthwhile(call.threads(), w.size() << 10);
  team.each(batch * count, [&](int64_t task) {
    const int64_t b = task / count, at = task % count * length;
    run({w.floats() + b * rows * columns + at,
         factor.size() ? factor.floats() + b * rows * rows : nullptr,
         static_cast<uint16_t*>(words.data) + b * rows * stride + at * bits / 16, rows, length, columns,
         stride});
  });
}

}  // namespace

HKI_DEFINE_HANDLER(TrellisEncode, trellis_encode)
