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

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int kWindow = 12;            // bits that a value depends on
constexpr int kStates = 1 << kWindow;
constexpr int64_t kOverlap = 64;       // steps on each side of the ends, to find how they meet
constexpr int64_t kRows = 32;          // rows that are encoded before the others take up their errors

// The value of a state: 1MAD (QTIP, arXiv:2406.11235).
float value_of(uint32_t state) {
  const uint32_t hash = state * 34038481u + 76625530u;
  int sum = 0;
  for (int i = 0; i < 32; i += 8) sum += hash >> i & 255;
  return (sum / 2 - 254) / 64.0f;
}

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
      values_[s] = value_of(s);
      const int branch = s / kShared, rest = s % kShared;
      ordered_[((rest % kBranches) * kBranches + branch) * kQuarter + rest / kBranches] = values_[s];
    }
  }

  // The codes of `length` numbers, whose end meets their beginning, and the values of the codes.
  void encode(const float* w, int64_t length, uint32_t* words, float* found) {
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

  static void put(uint32_t* words, int64_t at, uint32_t code) {
    words[at / 32] |= code << at % 32;
    if (at % 32 + bits > 32) words[at / 32 + 1] |= code >> (32 - at % 32);
  }

  alignas(64) float values_[kStates];
  alignas(64) float ordered_[kStates];
  std::vector<float> costs_, around_;
};

// One sequence of each row of a matrix.
struct Columns {
  const float* w;       // the first row's
  const float* factor;  // [rows, rows], or null: rows do not take up errors
  uint32_t* words;
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
  const int64_t stride = columns * bits / 32;
  const Team team{worthwhile(call.threads(), w.size() << 10)};
  team.each(batch * count, [&](int64_t task) {
    const int64_t b = task / count, at = task % count * length;
    run({w.floats() + b * rows * columns + at,
         factor.size() ? factor.floats() + b * rows * rows : nullptr,
         static_cast<uint32_t*>(words.data) + b * rows * stride + at * bits / 32, rows, length, columns,
         stride});
  });
}

// --- decoding ------------------------------------------------------------------------------------

#if defined(__AVX512BW__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
constexpr int64_t kLongest = 256;   // numbers in a sequence
constexpr int64_t kWrapped = 16;    // bytes after a sequence, with which it begins again

// The numbers, times 64, from the beginning of a byte on.
template <int bits>
struct Decoder {
#if defined(__AVX512BW__)
  Decoder() {
    alignas(64) uint8_t bytes[64];
    alignas(64) uint32_t shifts[16];
    for (int i = 0; i < 16; ++i) {
      shifts[i] = i * bits % 8;
      for (int j = 0; j < 4; ++j) bytes[4 * i + j] = i * bits / 8 + j;
    }
    bytes_ = _mm512_load_si512(bytes), shifts_ = _mm512_load_si512(shifts);
  }

  Floats operator()(const uint8_t* from) const {
    __m512i x = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    x = _mm512_srlv_epi32(_mm512_shuffle_epi8(x, bytes_), shifts_);
    x = _mm512_and_si512(x, _mm512_set1_epi32(kStates - 1));
    x = _mm512_add_epi32(_mm512_mullo_epi32(x, _mm512_set1_epi32(34038481)), _mm512_set1_epi32(76625530));
#if defined(__AVX512VNNI__)
    x = _mm512_dpbusd_epi32(_mm512_set1_epi32(-508), x, _mm512_set1_epi8(1));
#else
    x = _mm512_madd_epi16(_mm512_maddubs_epi16(x, _mm512_set1_epi8(1)), _mm512_set1_epi16(1));
    x = _mm512_sub_epi32(x, _mm512_set1_epi32(508));
#endif
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(x, 1));
  }

  __m512i bytes_, shifts_;
#elif defined(__AVX2__)
  Decoder() {
    alignas(32) uint8_t bytes[32];
    alignas(32) uint32_t shifts[8];
    for (int i = 0; i < 8; ++i) {
      shifts[i] = i * bits % 8;
      for (int j = 0; j < 4; ++j) bytes[4 * i + j] = i * bits / 8 + j;
    }
    bytes_ = _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes));
    shifts_ = _mm256_load_si256(reinterpret_cast<const __m256i*>(shifts));
  }

  Floats operator()(const uint8_t* from) const {
    __m256i x = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    x = _mm256_srlv_epi32(_mm256_shuffle_epi8(x, bytes_), shifts_);
    x = _mm256_and_si256(x, _mm256_set1_epi32(kStates - 1));
    x = _mm256_add_epi32(_mm256_mullo_epi32(x, _mm256_set1_epi32(34038481)), _mm256_set1_epi32(76625530));
    x = _mm256_madd_epi16(_mm256_maddubs_epi16(x, _mm256_set1_epi8(1)), _mm256_set1_epi16(1));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_sub_epi32(x, _mm256_set1_epi32(508)), 1));
  }

  __m256i bytes_, shifts_;
#else
  Decoder() {
    for (int s = 0; s < kStates; ++s) values_[s] = value_of(s) * 64;
  }

  Floats operator()(const uint8_t* from) const {
    Floats found;
    for (int i = 0; i < kLanes; ++i) {
      uint32_t word;
      std::memcpy(&word, from + i * bits / 8, 4);
      found[i] = values_[word >> i * bits % 8 & (kStates - 1)];
    }
    return found;
  }

  float values_[kStates];
#endif
};

// The numbers of one sequence.
template <int bits>
void decode(const uint8_t* words, int64_t length, float* out) {
  static const Decoder<bits> decoder;
  const int64_t own = length * bits / 8;
  alignas(64) uint8_t bytes[kLongest * bits / 8 + kWrapped];
  std::memcpy(bytes, words, own);
  std::memcpy(bytes + own, words, std::min(own, kWrapped));
  for (int64_t at = 0; at < length; at += kLanes) {
    const Floats numbers = decoder(bytes + at * bits / 8) / 64.0f;
    std::memcpy(out + at, &numbers, sizeof numbers);
  }
}

void trellis_decode(const Call& call) {
  const Array words = call.operand(0), out = call.result(0);
  const int64_t bits = call.number<int64_t>("bits"), length = call.number<int64_t>("steps");
  const auto* from = static_cast<const uint8_t*>(words.data);
  const auto run = bits == 2 ? decode<2> : bits == 3 ? decode<3> : decode<4>;
  const Team team{worthwhile(call.threads(), out.size())};
  team.parts(out.size() / length, 1, 64, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      run(from + i * length * bits / 8, length, out.floats() + i * length);
  });
}

}  // namespace

HKI_DEFINE_HANDLER(TrellisEncode, trellis_encode)
HKI_DEFINE_HANDLER(TrellisDecode, trellis_decode)
