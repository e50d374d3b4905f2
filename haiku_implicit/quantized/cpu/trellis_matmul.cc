// Products of dense activations with trellis codes (`types/trellis.py`), and their numbers, for XLA on CPUs.
//
// A matrix W[rows, length] has, in each row, sequences of numbers. Two products, in float32:
//   along the sequences:   y[m, row] = sum over k of x[m, k] * W[row, k]
//   along the rows:        y[m, k]   = sum over rows of x[m, row] * W[row, k]
//
// Each number is a function of the 12 bits from its first bit on, so that vectors of numbers are decoded
// in registers, and multiplied at once. A unit is 32 numbers: 2, 3 or 4 words, and the bits after them.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "call.h"
#include "codes.h"
#include "threads.h"
#include "trellis.h"

namespace {

constexpr int kUnit = 32;                // numbers
constexpr int kOfUnit = kUnit / kLanes;  // vectors of them
constexpr int kTogether = 8;             // rows whose products are summed before they are added to others
constexpr float kScale = 1.0f / 128;     // of the integers that are decoded

// --- vectors of numbers --------------------------------------------------------------------------

#if defined(HKI_AVX512) || defined(HKI_AVX2)
#if defined(HKI_AVX512)
typedef __m512i Vector;

template <int bytes>
inline Vector repeat(const uint8_t* p) {
  if constexpr (bytes == 8) return _mm512_set1_epi64(load<int64_t>(p));
  return _mm512_broadcast_i32x4(load<__m128i>(p));
}
inline Vector windows(Vector x, Vector places, Vector shifts) {
  x = _mm512_srlv_epi32(_mm512_shuffle_epi8(x, places), shifts);
  return _mm512_and_si512(x, _mm512_set1_epi32(kStates - 1));
}
inline Floats numbers(Vector x) {
  x = _mm512_add_epi32(_mm512_mullo_epi32(x, _mm512_set1_epi32(kFactor)), _mm512_set1_epi32(kAdded));
#if defined(__AVX512VNNI__)
  x = _mm512_dpbusd_epi32(_mm512_set1_epi32(-508), x, _mm512_set1_epi8(1));
#else
  x = _mm512_madd_epi16(_mm512_maddubs_epi16(x, _mm512_set1_epi8(1)), _mm512_set1_epi16(1));
  x = _mm512_sub_epi32(x, _mm512_set1_epi32(508));
#endif
  return (Floats)_mm512_cvtepi32_ps(_mm512_and_si512(x, _mm512_set1_epi32(-2)));
}
#else
typedef __m256i Vector;

template <int bytes>
inline Vector repeat(const uint8_t* p) {
  if constexpr (bytes == 8) return _mm256_set1_epi64x(load<int64_t>(p));
  return _mm256_broadcastsi128_si256(load<__m128i>(p));
}
inline Vector windows(Vector x, Vector places, Vector shifts) {
  x = _mm256_srlv_epi32(_mm256_shuffle_epi8(x, places), shifts);
  return _mm256_and_si256(x, _mm256_set1_epi32(kStates - 1));
}
inline Floats numbers(Vector x) {
  x = _mm256_add_epi32(_mm256_mullo_epi32(x, _mm256_set1_epi32(kFactor)), _mm256_set1_epi32(kAdded));
  x = _mm256_madd_epi16(_mm256_maddubs_epi16(x, _mm256_set1_epi8(1)), _mm256_set1_epi16(1));
  x = _mm256_sub_epi32(x, _mm256_set1_epi32(508));
  return (Floats)_mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(-2)));
}
#endif

// Decodes the vectors of a unit, over `kScale`.
template <int bits>
struct Trellis {
  static constexpr int kLoaded = (kLanes - 1) * bits / 8 + 4 > 8 ? 16 : 8;
  static constexpr int kBytes = kUnit * bits / 8, kRead = kBytes - kLanes * bits / 8 + kLoaded;
  static_assert(kRead <= 2 * kBytes);  // the last unit but one reads no further than its sequence
  Vector places, shifts;

  Trellis() {
    alignas(64) uint8_t at[kLanes * 4];
    alignas(64) uint32_t by[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      by[i] = i * bits % 8;
      for (int j = 0; j < 4; ++j) at[4 * i + j] = i * bits / 8 + j;
    }
    places = load<Vector>(at), shifts = load<Vector>(by);
  }

  Floats operator()(const uint8_t* p, int v) const {
    return numbers(windows(repeat<kLoaded>(p + v * (kLanes * bits / 8)), places, shifts));
  }
};
#else
template <int bits>
struct Trellis {
  static constexpr int kBytes = kUnit * bits / 8, kRead = kBytes + 4;
  float values[kStates];

  Trellis() {
    for (int s = 0; s < kStates; ++s) values[s] = value_of(s) / kScale;
  }

  Floats operator()(const uint8_t* p, int v) const {
    Floats found;
    for (int i = 0; i < kLanes; ++i) {
      const int first = (v * kLanes + i) * bits;
      found[i] = values[load<uint32_t>(p + first / 8) >> first % 8 & (kStates - 1)];
    }
    return found;
  }
};
#endif

// The matrix. (Its bytes have no more than the last unit's after them.)
struct Matrix {
  const uint8_t* words;
  int64_t rows, length, steps, row_bytes;

  int64_t sequences() const { return (length + steps - 1) / steps; }
};

// The last unit of a sequence, which the first bytes of the sequence follow.
template <int bits>
struct Last {
  alignas(16) uint8_t bytes[Trellis<bits>::kRead];

  Last(const uint8_t* sequence, int64_t steps) {
    constexpr int own = Trellis<bits>::kBytes;
    std::memcpy(bytes, sequence + steps * bits / 8 - own, own);
    std::memcpy(bytes + own, sequence, std::min<int>(4, sizeof bytes - own));
  }
};

// --- products ------------------------------------------------------------------------------------

// y[M, first * steps ...] of some sequences; x is [rows, M], y rows are `stride` apart.
template <int bits, int M>
void along_rows(const Matrix& w, const float* x, int64_t first, int64_t last, float* y, int64_t stride) {
  static const Trellis<bits> vector;
  constexpr int kBytes = Trellis<bits>::kBytes;
  const int64_t bytes = w.steps * bits / 8, units = w.steps / kUnit;
  for (int64_t r = 0; r < w.rows; r += kTogether) {
    const int64_t count = std::min<int64_t>(kTogether, w.rows - r);
    const float* own_x = x + r * M;
    const auto add = [&](const uint8_t* p, int64_t apart, float* to) {
      for (int v = 0; v < kOfUnit; ++v, to += kLanes) {
        Floats sums[M] = {};
        for (int64_t i = 0; i < count; ++i) {
          const Floats numbers = vector(p + i * apart, v);
          HKI_UNROLL
          for (int m = 0; m < M; ++m) sums[m] += numbers * own_x[i * M + m];
        }
        HKI_UNROLL
        for (int m = 0; m < M; ++m) store(to + m * stride, load<Floats>(to + m * stride) + sums[m]);
      }
    };
    for (int64_t s = first; s < last; ++s) {
      const uint8_t* p = w.words + r * w.row_bytes + s * bytes;
      float* to = y + (s - first) * w.steps;
      for (int64_t u = 0; u + 1 < units; ++u, to += kUnit) add(p + u * kBytes, w.row_bytes, to);
      alignas(16) uint8_t ends[kTogether * 32];
      for (int64_t i = 0; i < count; ++i) {
        const Last<bits> end(p + i * w.row_bytes, w.steps);
        std::memcpy(ends + i * 32, end.bytes, sizeof end.bytes);
      }
      add(ends, 32, to);
    }
  }
}

// y[M, first:last]; x is [M, sequences * steps].
template <int bits, int M>
void along_sequences(const Matrix& w, const float* x, int64_t first, int64_t last, float* y) {
  static const Trellis<bits> vector;
  constexpr int kBytes = Trellis<bits>::kBytes, kSums = M * 2 > kRegisters / 2 ? 1 : 2;
  const int64_t bytes = w.steps * bits / 8, count = w.sequences(), length = count * w.steps;
  for (int64_t r = first; r < last; ++r) {
    Floats sums[M][kSums] = {};
    const float* own_x = x;
    const auto add = [&](const uint8_t* p) {
      HKI_UNROLL
      for (int v = 0; v < kOfUnit; ++v, own_x += kLanes) {
        const Floats numbers = vector(p, v);
        HKI_UNROLL
        for (int m = 0; m < M; ++m) sums[m][v % kSums] += numbers * load<Floats>(own_x + m * length);
      }
    };
    for (int64_t s = 0; s < count; ++s) {
      const uint8_t* p = w.words + r * w.row_bytes + s * bytes;
      for (int64_t u = 0; u + 1 < w.steps / kUnit; ++u) add(p + u * kBytes);
      add(Last<bits>(p, w.steps).bytes);
    }
    for (int m = 0; m < M; ++m) y[m * w.rows + r] = sum(kSums == 2 ? sums[m][0] + sums[m][1] : sums[m][0]);
  }
}

// M rows of x, from the first on, with all of a matrix.
template <int bits, int M>
void multiply(const Matrix& w, bool by_rows, const float* x, int64_t count, float* y, const Team& team) {
  const int64_t padded = w.sequences() * w.steps;
  const int64_t inputs = by_rows ? w.rows : w.length, outputs = by_rows ? w.length : w.rows;
  float* arranged = scratch(M * std::max(w.rows, padded));
  for (int m = 0; m < M; ++m) {
    const float* from = x + std::min<int64_t>(m, count - 1) * inputs;
    if (by_rows)
      for (int64_t i = 0; i < inputs; ++i) arranged[i * M + m] = from[i] * kScale;
    else
      for (int64_t i = 0; i < padded; ++i) arranged[m * padded + i] = i < inputs ? from[i] * kScale : 0;
  }
  if (by_rows) {
    team.parts(w.sequences(), 1, 16, [&](int64_t first, int64_t last) {
      const int64_t stride = (last - first) * w.steps;
      float* own = scratch<1>(M * stride);
      std::fill_n(own, M * stride, 0.0f);
      along_rows<bits, M>(w, arranged, first, last, own, stride);
      const int64_t from = first * w.steps, wanted = std::min(stride, outputs - from);
      for (int64_t m = 0; m < std::min<int64_t>(M, count); ++m)
        std::copy_n(own + m * stride, wanted, y + m * outputs + from);
    });
  } else {
    team.parts(w.rows, 1, 256, [&](int64_t first, int64_t last) {
      float* own = M == count ? y : scratch<1>(M * w.rows);
      along_sequences<bits, M>(w, arranged, first, last, own);
      if (own != y)
        for (int64_t m = 0; m < count; ++m)
          std::copy(own + m * outputs + first, own + m * outputs + last, y + m * outputs + first);
    });
  }
}

template <int bits>
void multiply(const Matrix& w, bool by_rows, const float* x, int64_t count, float* y, const Team& team) {
  const int64_t inputs = by_rows ? w.rows : w.length, outputs = by_rows ? w.length : w.rows;
  for (int64_t m = 0; m < count;) {
    const int64_t left = count - m;
    const auto run = left == 1 ? multiply<bits, 1> : left <= 4 ? multiply<bits, 4> : multiply<bits, 8>;
    run(w, by_rows, x + m * inputs, std::min<int64_t>(left, 8), y + m * outputs, team);
    m += 8;
  }
}

void trellis_matmul(const Call& call) {
  const Array x = call.operand(0), words = call.operand(1), y = call.result(0);
  const auto number = [&](const char* name) { return call.number<int64_t>(name); };
  const int64_t bits = number("bits"), steps = number("steps"), length = number("length");
  const bool by_rows = number("along_rows");
  const int64_t batch = x.shape[0], m = x.shape[1], inputs = x.shape[2], outputs = y.shape[2];
  const int64_t rows = words.shape[1], row_bytes = words.shape[2] * 4;
  const auto run = bits == 2 ? multiply<2> : bits == 3 ? multiply<3> : multiply<4>;
  over_batch(batch, m * rows * length, call.threads(), true, [&](int64_t b, const Team& team) {
    const Matrix w{static_cast<const uint8_t*>(words.data) + b * rows * row_bytes, rows, length, steps, row_bytes};
    run(w, by_rows, x.floats() + b * m * inputs, m, y.floats() + b * m * outputs, team);
  });
}

// --- numbers -------------------------------------------------------------------------------------

template <int bits>
void decode(const uint8_t* sequence, int64_t steps, float* out) {
  static const Trellis<bits> vector;
  const auto unit = [&](const uint8_t* p, float* to) {
    for (int v = 0; v < kOfUnit; ++v) store(to + v * kLanes, vector(p, v) * kScale);
  };
  const int64_t before = steps / kUnit - 1;
  for (int64_t u = 0; u < before; ++u) unit(sequence + u * Trellis<bits>::kBytes, out + u * kUnit);
  unit(Last<bits>(sequence, steps).bytes, out + before * kUnit);
}

void trellis_decode(const Call& call) {
  const Array words = call.operand(0), out = call.result(0);
  const int64_t bits = call.number<int64_t>("bits"), steps = call.number<int64_t>("steps");
  const auto* from = static_cast<const uint8_t*>(words.data);
  const auto run = bits == 2 ? decode<2> : bits == 3 ? decode<3> : decode<4>;
  const Team team{worthwhile(call.threads(), out.size())};
  team.parts(out.size() / steps, 1, 64, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) run(from + i * steps * bits / 8, steps, out.floats() + i * steps);
  });
}

}  // namespace

HKI_DEFINE_HANDLER(TrellisMatmul, trellis_matmul)
HKI_DEFINE_HANDLER(TrellisDecode, trellis_decode)
