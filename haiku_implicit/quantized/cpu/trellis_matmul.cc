// Products of dense activations with trellis codes (`types/trellis.py`), and their numbers, for XLA on CPUs.
//
// A matrix W[rows, length] has, in each row, lanes of 16 numbers. Two products, in float32:
//   along the sequences:   y[m, row] = sum over k of x[m, k] * W[row, k]
//   along the rows:        y[m, k]   = sum over rows of x[m, row] * W[row, k]
//
// The words of lanes are next to each other, and so are the numbers of one step of the lanes. So a vector
// of words is a vector of windows after two shifts, and numbers, integers of 16 bits, after a product.
// Activations become two integers of 16 bits each (`Activations`), 30 bits of the largest, and sums have 32. If
// activations are rounded to 8 bits, there is one, and with AVX-512 VNNI one instruction multiplies it with both
// bytes of a number, which are not added before. D is how many integers an activation has.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "call.h"
#include "codes.h"
#include "threads.h"
#include "trellis.h"

namespace {

typedef uint16_t Words __attribute__((vector_size(kLanes * 4)));

constexpr int kWords = 2 * kLanes;             // in a vector
constexpr int kRowsTogether = 64;              // that are decoded before they are multiplied
constexpr int kLargest = kRegisters / 4;       // rows of integers that are multiplied together
constexpr int kChunksTogether = 8;             // 256 products in each sum: no more fit 32 bits
constexpr float kUnit = 1.0f / 64;             // of numbers

// Whether numbers stay two bytes each, and activations are two equal bytes.
#if defined(HKI_AVX512) && defined(__AVX512VNNI__)
constexpr bool in_bytes(int D) { return D == 1; }
#else
constexpr bool in_bytes(int D) { return false; }
#endif

// --- vectors of numbers --------------------------------------------------------------------------

// The windows from bit `shift` of words on; those with `shift` over 4 end in the next words. (Products
// shift by a number that is no constant in one operation, on each port that multiplies.)
template <bool crosses>
inline Words windows(Words word, Words next, int shift) {
#if defined(HKI_AVX512)
  const __m512i power = _mm512_set1_epi16(1 << (16 - shift)), mask = _mm512_set1_epi16(kStates - 1);
  if (!crosses) return (Words)_mm512_and_si512(_mm512_srlv_epi16((__m512i)word, _mm512_set1_epi16(shift)), mask);
  const __m512i low = _mm512_mulhi_epu16((__m512i)word, power), high = _mm512_mullo_epi16((__m512i)next, power);
  return (Words)_mm512_ternarylogic_epi32(low, high, mask, 0xa8);  // (low | high) & mask
#elif defined(HKI_AVX2)
  const __m256i power = _mm256_set1_epi16(1 << (16 - shift)), mask = _mm256_set1_epi16(kStates - 1);
  if (!crosses) return (Words)_mm256_and_si256(_mm256_srl_epi16((__m256i)word, _mm_cvtsi32_si128(shift)), mask);
  const __m256i low = _mm256_mulhi_epu16((__m256i)word, power), high = _mm256_mullo_epi16((__m256i)next, power);
  return (Words)_mm256_and_si256(_mm256_or_si256(low, high), mask);
#else
  return (crosses ? word >> shift | next << (16 - shift) : word >> shift) & (uint16_t)(kStates - 1);
#endif
}

template <int bits, int D>
inline Words numbers(Words window) {
  constexpr Code code = code_of(bits);
  const Words hash = window * code.factor;
#if defined(HKI_AVX512)
  const __m512i bytes = code.mixed ? _mm512_avg_epu8((__m512i)hash, (__m512i)window) : (__m512i)hash;
  if (in_bytes(D)) return (Words)bytes;
  return (Words)_mm512_maddubs_epi16(bytes, _mm512_set1_epi8(1));
#elif defined(HKI_AVX2)
  const __m256i bytes = code.mixed ? _mm256_avg_epu8((__m256i)hash, (__m256i)window) : (__m256i)hash;
  return (Words)_mm256_maddubs_epi16(bytes, _mm256_set1_epi8(1));
#else
  const Words low = hash & 255, high = hash >> 8;
  return code.mixed ? (low + (window & 255) + 1) / 2 + (high + (window >> 8) + 1) / 2 : low + high;
#endif
}

// Takes words of two vectors in turns: of the first half of each 16 bytes, and of the second.
inline void take_turns(Words& a, Words& b) {
#if defined(HKI_AVX512)
  const __m512i low = _mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
  b = (Words)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b), a = (Words)low;
#elif defined(HKI_AVX2)
  const __m256i low = _mm256_unpacklo_epi16((__m256i)a, (__m256i)b);
  b = (Words)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b), a = (Words)low;
#else
  const Words first = a, second = b;
  for (int i = 0; i < kLanes; ++i) {
    a[2 * i] = first[i], a[2 * i + 1] = second[i];
    b[2 * i] = first[kLanes + i], b[2 * i + 1] = second[kLanes + i];
  }
#endif
}

// Words of lanes that follow those of a vector, if circles have 16 lanes and a vector whole circles.
constexpr bool kWholeCircles = kWords % kSteps == 0;
inline Words following(Words word) {
#if defined(HKI_AVX512)
  Words index;
  for (int i = 0; i < kWords; ++i) index[i] = i / 16 * 16 + (i + 1) % 16;
  return (Words)_mm512_permutexvar_epi16((__m512i)index, (__m512i)word);
#elif defined(HKI_AVX2)
  const __m256i own = (__m256i)word, halves = _mm256_permute2x128_si256(own, own, 1);
  return (Words)_mm256_alignr_epi8(halves, own, 2);
#else
  return word;  // (not called)
#endif
}

// Adds the products of pairs of numbers and integers of 16 bits.
template <int D>
inline Ints add_products(Ints sums, Words a, Words b) {
#if defined(HKI_AVX512) && defined(__AVX512VNNI__)
  if (in_bytes(D)) return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
  return (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(HKI_AVX512)
  return sums + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(HKI_AVX2)
  return sums + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  for (int i = 0; i < 2 * kLanes; ++i)  // (unsigned: what overflows on the way comes back)
    sums[i / 2] = (uint32_t)sums[i / 2] + (uint32_t)((int16_t)a[i] * (int16_t)b[i]);
  return sums;
#endif
}

// --- words ---------------------------------------------------------------------------------------

// The matrix: words [rows, bits, lanes]. The lanes of a sequence are a circle.
struct Matrix {
  const uint16_t* words;
  int64_t rows, length, lanes, circle;
  int bits;

  int64_t row_size() const { return bits * lanes; }
  int64_t chunks() const { return (lanes + kWords - 1) / kWords; }  // vectors of lanes
};

// Copies the words of a chunk of some rows to [rows, bits + 1]: as one plane more, the first words of the
// lanes that follow.
HKI_ONCE void copy_words(const Matrix& w, int64_t row, int64_t rows, int64_t chunk, Words* to) {
  const int64_t first = chunk * kWords, size = w.row_size();
  const uint16_t* const from = w.words + row * size + first;
  const bool whole = kWholeCircles && w.circle == 16;
  const int planes = w.bits + 1;
  for (int plane = 0; plane < planes - whole; ++plane) {
    const int64_t ahead = plane == w.bits, count = w.lanes - ahead - first;
    const uint16_t* own = ahead ? from + 1 : from + plane * w.lanes;
    Words* own_to = to + plane;
    if (count >= kWords) {
      for (int64_t i = 0; i < rows; ++i) own_to[i * planes] = load<Words>(own + i * size);
    } else {
      for (int64_t i = 0; i < rows; ++i) {
        own_to[i * planes] = Words{};
        std::memcpy(own_to + i * planes, own + i * size, count * sizeof *own);
      }
    }
  }
  if (whole) {
    for (int64_t i = 0; i < rows; ++i) to[i * planes + w.bits] = following(to[i * planes]);
    return;
  }
  // The last lane of a circle is followed by the first.
  auto* const next = reinterpret_cast<uint16_t*>(to + w.bits);
  const int64_t last = std::min<int64_t>(kWords, w.lanes - first);
  for (int64_t end = w.circle - 1 - first % w.circle; end < last; end += w.circle)
    for (int64_t i = 0; i < rows; ++i) next[i * planes * kWords + end] = from[i * size + end + 1 - w.circle];
}

// Asks for the words of a chunk of a row, which are needed soon. (GCC drops calls that only do this.)
__attribute__((always_inline)) inline void prefetch(const Matrix& w, int64_t row, int64_t chunk) {
  if (row >= w.rows) return;
  const uint16_t* from = w.words + row * w.row_size() + chunk * kWords;
  for (int plane = 0; plane < w.bits; ++plane) __builtin_prefetch(from + plane * w.lanes, 0, 2);
}

// The numbers of a step of the lanes, less their bias; words are as `copy_words` leaves them.
template <int bits, int D, typename Function>
inline void at_step(int step, const Function& function) {
  const int plane = step * bits / 16, shift = step * bits % 16;
  if (shift > 16 - kWindow)
    function([=](const Words* w) { return numbers<bits, D>(windows<true>(w[plane], w[plane + 1], shift)); });
  else
    function([=](const Words* w) { return numbers<bits, D>(windows<false>(w[plane], w[plane], shift)); });
}

// 16 bits of two words, from a bit of the first one on.
template <int shift>
HKI_INLINE Words part_of_two(Words word, Words next) {
  if constexpr (shift == 0) return word;
#if defined(HKI_AVX512) && defined(__AVX512VBMI2__)
  return (Words)_mm512_shrdi_epi16((__m512i)word, (__m512i)next, shift);
#else
  return word >> shift | next << (16 - shift);
#endif
}

// The first of the steps whose windows are parts of the same 16 bits as a step's.
constexpr int first_together(int bits, int step) {
  const int together = (16 - kWindow) / bits + 1, round = bits == 3 ? 16 : 16 / bits;
  return step / round * round + step % round / together * together;
}

// The same, for a step that is known.
template <int bits, int D, int step>
HKI_INLINE Words at_known_step(const Words* w) {
  constexpr int first = first_together(bits, step), rest = (step - first) * bits;
  constexpr int plane = first * bits / 16, shift = first * bits % 16;
  const Words word = part_of_two<shift>(w[plane], w[plane + 1]);
  return numbers<bits, D>(rest == 16 - kWindow ? word >> rest : word >> rest & (uint16_t)(kStates - 1));
}

// Writes the numbers of a row.
template <int bits>
void decode_row(const Matrix& w, int64_t row, float* out) {
  for (int64_t chunk = 0; chunk < w.chunks(); ++chunk) {
    Words words[bits + 1];
    copy_words(w, row, 1, chunk, words);
    const int64_t first = chunk * kWords, count = std::min<int64_t>(kWords, w.lanes - first);
    for (int step = 0; step < kSteps; ++step)
      at_step<bits, 2>(step, [&](const auto& decoded) {
        const Words found = decoded(words);
        float* to = out + step * w.lanes + first;
        for (int64_t i = 0; i < count; ++i) to[i] = (found[i] - code_of(bits).bias) * kUnit;
      });
  }
}

// --- activations ---------------------------------------------------------------------------------

// One row of activations as `unit * (65536 * high + low)`, which has 30 bits of the largest, or rounded to
// `unit * code`. D rows of integers stand for it; there may be rows of zeros behind them.
template <int D>
struct Activations {
  float unit;
  bool usual;  // else the products are computed in floats: units or sums might leave their range

  Activations() = default;
  Activations(const float* x, int64_t count) : unit(1), usual(true) {
    float largest = 0;
    for (int64_t i = 0; i < count; ++i) usual &= std::isfinite(x[i]), largest = std::max(largest, std::abs(x[i]));
    usual &= largest == 0 || (largest > 1e-27f && largest < 1e30f);
    int exponent = 0;
    std::frexp(largest, &exponent);
    if (usual) unit = std::ldexp(1.0f, exponent - 30);
  }

  // The integers of an activation.
  std::array<int16_t, D> of(float x) const {
    const int32_t whole = usual ? (int32_t)std::rint(x * (1 / unit)) : 0;
    const int16_t high = whole + 32768 >> 16;
    return {high, (int16_t)(whole - high * 65536)};
  }
};

template <>
struct Activations<1> {
  float unit;
  static constexpr bool usual = true;  // (what is not finite has the unit NaN)

  Activations() = default;
  Activations(const float* x, int64_t count) : unit(scale_of_row(x, count)) {}

  std::array<int16_t, 1> of(float x) const { return {(int16_t)(unit == unit ? nearest_code(x * (1 / unit)) : 0)}; }
};

// An integer as numbers are multiplied with it.
template <int D>
inline uint16_t factor(int16_t integer) { return in_bytes(D) ? (uint8_t)integer * 257 : integer; }

template <int D>
inline Floats in_floats(const Ints* sums, float unit) {
  const Floats first = __builtin_convertvector(sums[0], Floats);
  return D == 1 ? first * unit : (first * 65536 + __builtin_convertvector(sums[D - 1], Floats)) * unit;
}

// How many rows of integers are multiplied together, of `count` all in all.
template <int D>
inline int together(int count) { return count == D ? D : std::min(count <= 4 ? 4 : 8, kLargest); }

// --- products along the rows ---------------------------------------------------------------------

// Adds products of pairs of numbers of two rows; x is [pairs, stride], of pairs of integers.
template <int D, int K>
HKI_ONCE void add_pairs(const Words* decoded, int64_t pairs, const int32_t* x, int64_t stride, Ints* out) {
  Ints sums[K][2] = {};
  for (int64_t i = 0; i < pairs; ++i) {
    const Words first = decoded[2 * i], second = decoded[2 * i + 1];
    HKI_UNROLL
    for (int k = 0; k < K; ++k) {
      const Words own = (Words)(Ints{} + x[i * stride + k]);
      sums[k][0] = add_products<D>(sums[k][0], first, own);
      sums[k][1] = add_products<D>(sums[k][1], second, own);
    }
  }
  for (int k = 0; k < K; ++k)
    for (int half = 0; half < 2; ++half) out[half * K + k] += sums[k][half];
}

// One row of activations, or more, as the kernel reads them.
template <int D>
struct Pairs {
  const Activations<D>* rows;
  const int32_t* integers;  // [pairs, count]
  const int32_t* biases;    // [blocks of rows, count]
  int count;                // of rows of integers
};

// The same for one row of activations: numbers of steps whose windows are parts of the same 16 bits stay in
// registers.
template <int bits, int D, int first>
HKI_ONCE void add_pairs_of_row(const Words* words, int64_t pairs, const Pairs<D>& x, int64_t row, float* y) {
  constexpr int most = (16 - kWindow) / bits + 1;
  constexpr bool all = first_together(bits, first + most - 1) == first;
  constexpr int steps = all ? most : most - 1;
  const int32_t* integers = x.integers + row / 2 * D;
  const int32_t* biases = x.biases + row / kRowsTogether * D;
  for (int half = 0; half < 2; ++half) {
    Ints sums[steps][D];
    for (int i = 0; i < steps * D; ++i) sums[i / D][i % D] = Ints{} + biases[i % D];
    const Words* own = words + half * (bits + 1);
    for (int64_t i = 0; i < pairs; ++i, own += 2 * (bits + 1)) {
      Words of_x[D];
      for (int j = 0; j < D; ++j) of_x[j] = (Words)(Ints{} + integers[D * i + j]);
      repeat<steps>([&](auto step) HKI_INLINED {
        const Words decoded = at_known_step<bits, D, first + step>(own);
        for (int j = 0; j < D; ++j) sums[step][j] = add_products<D>(sums[step][j], decoded, of_x[j]);
      });
    }
    for (int i = 0; i < steps; ++i) {
      float* to = y + (first + i) * kWords + half * kLanes;
      store(to, load<Floats>(to) + in_floats<D>(sums[i], x.rows[0].unit * kUnit));
    }
  }
}

// Copies the words of a chunk of some rows as `copy_words`, and those of two rows take turns: before they are
// decoded, since there are fewer words than numbers. Rows fill up to four; the others are multiplied by zero.
template <int bits>
HKI_ONCE void copy_pairs(const Matrix& w, int64_t row, int64_t rows, int64_t chunk, Words* to) {
  const int64_t padded = round_up(rows, 4), size = w.row_size();
  Words* const end = to + padded * (bits + 1);
  if (kWholeCircles && w.circle == 16 && rows == padded && (chunk + 1) * kWords <= w.lanes) {
    const uint16_t* own = w.words + row * size + chunk * kWords;
    for (; to < end; to += 2 * (bits + 1), own += 2 * size) {
      HKI_UNROLL
      for (int plane = 0; plane < bits; ++plane) {
        Words first = load<Words>(own + plane * w.lanes), second = load<Words>(own + plane * w.lanes + size);
        if (plane == 0) {
          Words next = following(first), of_second = following(second);
          take_turns(next, of_second);
          to[bits] = next, to[2 * bits + 1] = of_second;
        }
        take_turns(first, second);
        to[plane] = first, to[plane + bits + 1] = second;
      }
    }
    return;
  }
  copy_words(w, row, rows, chunk, to);
  for (int64_t i = rows; i < padded; ++i) std::copy_n(to, bits + 1, to + i * (bits + 1));
  for (; to < end; to += 2 * (bits + 1))
    for (int plane = 0; plane <= bits; ++plane) take_turns(to[plane], to[plane + bits + 1]);
}

// Adds to y[chunk, m, step, 2, kLanes], the products of some chunks.
template <int bits, int D>
void along_rows(const Matrix& w, const Pairs<D>& x, int m, int64_t first, int64_t last, float* y) {
  const int64_t size = m * kSteps * kWords;
  alignas(64) Words words[kRowsTogether * (bits + 1)], decoded[kRowsTogether];
  const int each = together<D>(x.count);
  const auto run = each == 4 ? add_pairs<D, 4> : add_pairs<D, 8>;
  for (int64_t r = 0; r < w.rows; r += kRowsTogether) {
    const int64_t count = std::min<int64_t>(kRowsTogether, w.rows - r), pairs = (count + 3) / 4 * 2;
    for (int64_t c = first; c < last; ++c) {
      copy_pairs<bits>(w, r, count, c, words);
      float* const of_chunk = y + (c - first) * size;
      if (x.count == D) {
        repeat<kSteps>([&](auto step) HKI_INLINED {
          if constexpr (first_together(bits, step) == step) add_pairs_of_row<bits, D, step>(words, pairs, x, r, of_chunk);
        });
        continue;
      }
      for (int step = 0; step < kSteps; ++step) {
        at_step<bits, D>(step, [&](const auto& of) {
          for (int64_t i = 0; i < 2 * pairs; ++i) decoded[i] = of(words + i * (bits + 1));
        });
        float* to = of_chunk + step * kWords;
        for (int k = 0; k < x.count; k += each) {
          Ints sums[2 * 8];
          for (int i = 0; i < each; ++i)
            sums[i] = sums[each + i] = Ints{} + x.biases[r / kRowsTogether * x.count + k + i];
          run(decoded, pairs, x.integers + r / 2 * x.count + k, x.count, sums);
          for (int i = 0; i < each && k + i < D * m; i += D)
            for (int half = 0; half < 2; ++half) {
              const int at = (k + i) / D;
              float* own = to + at * kSteps * kWords + half * kLanes;
              store(own, load<Floats>(own) + in_floats<D>(sums + half * each + i, x.rows[at].unit * kUnit));
            }
        }
      }
    }
  }
}

// --- products along the sequences ----------------------------------------------------------------

// Adds products of the numbers of a chunk; x is [K, kSteps].
template <int D, int K>
HKI_ONCE void add_steps(const Words* decoded, const Words* x, Ints* out) {
  constexpr int kApart = K == 4 ? 2 : 1;
  Ints sums[kApart][K] = {};
  HKI_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    HKI_UNROLL
    for (int k = 0; k < K; ++k)
      sums[step % kApart][k] = add_products<D>(sums[step % kApart][k], decoded[step], x[k * kSteps + step]);
  }
  for (int k = 0; k < K; ++k)
    for (int j = 0; j < kApart; ++j) out[k] += sums[j][k];
}

// The same for the words of a chunk and one row of activations: numbers stay in registers.
template <int bits, int D>
HKI_INLINE void add_row(const Words* words, const Words* x, Ints* out) {
  Words own[bits + 1];
  for (int plane = 0; plane <= bits; ++plane) own[plane] = words[plane];
  Ints sums[2][D] = {};
  for (int k = 0; k < D; ++k) sums[0][k] = out[k];
  repeat<kSteps>([&](auto step) HKI_INLINED {
    const Words decoded = at_known_step<bits, D, step>(own);
    for (int k = 0; k < D; ++k) sums[step % 2][k] = add_products<D>(sums[step % 2][k], decoded, x[k * kSteps + step]);
  });
  for (int k = 0; k < D; ++k) out[k] = sums[0][k] + sums[1][k];
}

// One row of activations, or more, as the kernel reads them.
template <int D>
struct Steps {
  const Activations<D>* rows;
  const Words* integers;  // [chunks, count, kSteps]
  const Ints* biases;     // [groups of chunks, count]
  int count;              // of rows of integers
};

// y[m, first:last], the products with some rows.
template <int bits, int D>
void along_sequences(const Matrix& w, const Steps<D>& x, int m, int64_t first, int64_t last, float* y) {
  constexpr int kRows = 16;  // that share the activations of a chunk
  const int each = together<D>(x.count);
  const auto run = each == 4 ? add_steps<D, 4> : add_steps<D, 8>;
  Ints* sums = reinterpret_cast<Ints*>(scratch<2>(kRows * x.count * kLanes));
  alignas(64) Words words[kRows * (bits + 1)], decoded[kSteps];
  for (int64_t r = first; r < last; r += kRows) {
    const int64_t rows = std::min<int64_t>(kRows, last - r);
    for (int i = 0; i < m; ++i) std::fill_n(y + i * w.rows + r, rows, 0.0f);
    for (int64_t c = 0; c < w.chunks(); ++c) {
      copy_words(w, r, rows, c, words);
      const Words* integers = x.integers + c * x.count * kSteps;
      const bool begins = c % kChunksTogether == 0, ahead = c + 1 < w.chunks();
      const bool ends = (c + 1) % kChunksTogether == 0 || !ahead;
      for (int64_t i = 0; i < rows; ++i) {
        prefetch(w, ahead ? r + i : r + i + kRows, ahead ? c + 1 : 0);
        Ints* own = sums + i * x.count;
        if (begins) std::copy_n(x.biases + c / kChunksTogether * x.count, x.count, own);
        const Words* of_row = words + i * (bits + 1);
        if (x.count == D) {
          add_row<bits, D>(of_row, integers, own);
        } else {
          repeat<kSteps>([&](auto step) HKI_INLINED { decoded[step] = at_known_step<bits, D, step>(of_row); });
          for (int k = 0; k < x.count; k += each) run(decoded, integers + k * kSteps, own + k);
        }
        if (!ends) continue;
        for (int j = 0; j < m; ++j)
          y[j * w.rows + r + i] += sum(in_floats<D>(own + D * j, x.rows[j].unit * kUnit));
      }
    }
  }
}

// --- calls ---------------------------------------------------------------------------------------

// Activations [m, rows] with all of a matrix.
template <int bits, int D>
void by_rows(const Matrix& w, const float* x, const Activations<D>* rows, int m, float* y, const Team& team) {
  const int count = round_up(D * m, together<D>(D * m));
  const int64_t blocks = (w.rows + kRowsTogether - 1) / kRowsTogether, padded = blocks * kRowsTogether;
  int32_t* pairs = reinterpret_cast<int32_t*>(scratch((padded / 2 + blocks) * count));
  int32_t* biases = pairs + padded / 2 * count;
  std::fill_n(pairs, (padded / 2 + blocks) * count, 0);
  for (int i = 0; i < m; ++i)
    for (int64_t r = 0; r < w.rows; ++r) {
      const auto own = rows[i].of(x[i * w.rows + r]);
      for (int j = 0; j < D; ++j) {
        pairs[r / 2 * count + D * i + j] |= (uint32_t)factor<D>(own[j]) << (r % 2 * 16);
        biases[r / kRowsTogether * count + D * i + j] -= own[j] * code_of(bits).bias;
      }
    }
  const Pairs<D> all{rows, pairs, biases, count};
  team.parts(w.chunks(), 1, 8, [&](int64_t first, int64_t last) {
    const int64_t size = m * kSteps * kWords;
    float* own = scratch<1>((last - first) * size);
    std::fill_n(own, (last - first) * size, 0.0f);
    along_rows<bits, D>(w, all, m, first, last, own);
    for (int i = 0; i < m; ++i)
      for (int step = 0; step < kSteps; ++step)
        for (int64_t l = first * kWords; l < std::min(last * kWords, w.lanes); ++l) {
          const int64_t at = l % kWords, to = step * w.lanes + l;
          const int64_t from = at / 4 % 2 * kLanes + at / 8 * 4 + at % 4;
          if (to < w.length)
            y[i * w.length + to] = own[(l / kWords - first) * size + (i * kSteps + step) * kWords + from];
        }
  });
}

// Activations [m, length] with all of a matrix.
template <int bits, int D>
void by_sequences(const Matrix& w, const float* x, const Activations<D>* rows, int m, float* y, const Team& team) {
  const int count = round_up(D * m, together<D>(D * m));
  const int64_t chunks = w.chunks(), groups = (chunks + kChunksTogether - 1) / kChunksTogether;
  const int64_t size = chunks * count * kSteps;
  Words* integers = reinterpret_cast<Words*>(scratch((size + groups * count) * kLanes));
  Ints* biases = reinterpret_cast<Ints*>(integers + size);
  std::fill_n(integers, size + groups * count, Words{});
  auto* const flat = reinterpret_cast<uint16_t*>(integers);
  for (int i = 0; i < m; ++i)
    for (int64_t j = 0; j < w.length; ++j) {
      const int64_t step = j / w.lanes, lane = j % w.lanes;
      const int64_t at = ((lane / kWords * count + D * i) * kSteps + step) * kWords + lane % kWords;
      const auto own = rows[i].of(x[i * w.length + j]);
      for (int k = 0; k < D; ++k) flat[at + k * kSteps * kWords] = factor<D>(own[k]);
    }
  for (int64_t i = 0; i < chunks * count; ++i)
    for (int step = 0; step < kSteps; ++step) {
      Ints& bias = biases[i / count / kChunksTogether * count + i % count];
      bias = add_products<D>(bias, Words{} + 1, integers[i * kSteps + step]);
    }
  for (int64_t i = 0; i < groups * count; ++i) biases[i] *= -code_of(bits).bias;
  const Steps<D> all{rows, integers, biases, count};
  team.parts(w.rows, 1, 256, [&](int64_t first, int64_t last) { along_sequences<bits, D>(w, all, m, first, last, y); });
}

template <int bits, int D>
void multiply(const Matrix& w, bool along_rows, const float* x, int64_t count, float* y, const Team& team) {
  constexpr int kMost = 32;
  const int64_t inputs = along_rows ? w.rows : w.length, outputs = along_rows ? w.length : w.rows;
  for (int64_t first = 0; first < count; first += kMost, x += kMost * inputs, y += kMost * outputs) {
    const int m = std::min<int64_t>(kMost, count - first);
    Activations<D> rows[kMost];
    for (int i = 0; i < m; ++i) rows[i] = Activations<D>(x + i * inputs, inputs);
    (along_rows ? by_rows<bits, D> : by_sequences<bits, D>)(w, x, rows, m, y, team);
    for (int i = 0; i < m; ++i) {
      if (rows[i].usual) continue;
      float* numbers = scratch(w.lanes * kSteps);
      const float* own = x + i * inputs;
      float* to = y + i * outputs;
      std::fill_n(to, outputs, 0.0f);
      for (int64_t r = 0; r < w.rows; ++r) {
        decode_row<bits>(w, r, numbers);
        for (int64_t j = 0; j < w.length; ++j)
          (along_rows ? to[j] : to[r]) += numbers[j] * (along_rows ? own[r] : own[j]);
      }
    }
  }
}

void trellis_matmul(const Call& call) {
  const Array x = call.operand(0), words = call.operand(1), y = call.result(0);
  const auto number = [&](const char* name) { return call.number<int64_t>(name); };
  const int64_t bits = number("bits"), steps = number("steps"), length = number("length");
  const bool along_rows = number("along_rows"), rounded = number("rounded");
  const int64_t batch = x.shape[0], m = x.shape[1], inputs = x.shape[2], outputs = y.shape[2];
  const int64_t rows = words.shape[1], size = words.shape[2];
  const auto run = bits == 2   ? rounded ? multiply<2, 1> : multiply<2, 2>
                   : bits == 3 ? rounded ? multiply<3, 1> : multiply<3, 2>
                               : rounded ? multiply<4, 1> : multiply<4, 2>;
  over_batch(batch, m * rows * length, call.threads(), true, [&](int64_t b, const Team& team) {
    const auto* own = static_cast<const uint16_t*>(words.data) + b * rows * size;
    const Matrix w{own, rows, length, size / bits, steps / kSteps, (int)bits};
    run(w, along_rows, x.floats() + b * m * inputs, m, y.floats() + b * m * outputs, team);
  });
}

void trellis_decode(const Call& call) {
  const Array words = call.operand(0), out = call.result(0);
  const int64_t bits = call.number<int64_t>("bits"), steps = call.number<int64_t>("steps");
  const int64_t size = words.shape.back(), rows = words.size() / size, lanes = size / bits;
  const Matrix w{static_cast<const uint16_t*>(words.data), rows, lanes * kSteps, lanes, steps / kSteps, (int)bits};
  const auto run = bits == 2 ? decode_row<2> : bits == 3 ? decode_row<3> : decode_row<4>;
  const Team team = worthwhile(call.threads(), out.size());
  team.parts(rows, 1, 64, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) run(w, r, out.floats() + r * w.length);
  });
}

}  // namespace

HKI_DEFINE_HANDLER(TrellisMatmul, trellis_matmul)
HKI_DEFINE_HANDLER(TrellisDecode, trellis_decode)
