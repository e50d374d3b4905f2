// Codes of few bits, and the values that they stand for, in vectors as wide as the CPU's.

#ifndef HAIKU_IMPLICIT_KERNELS_CODES_H_
#define HAIKU_IMPLICIT_KERNELS_CODES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "call.h"
#include "threads.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HKI_AVX512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HKI_AVX2
#endif
#if defined(HKI_AVX512) || defined(HKI_AVX2)
#include <immintrin.h>
#endif

namespace {

// --- vectors -------------------------------------------------------------------------------------

#if defined(HKI_AVX512)
constexpr int kLanes = 16, kTileRows = 12, kRegisters = 32;
#elif defined(HKI_AVX2)
constexpr int kLanes = 8, kTileRows = 6, kRegisters = 16;
#else
constexpr int kLanes = 4, kTileRows = 6, kRegisters = 16;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

template <typename T>
inline T load(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// What is called once for many products is not worth compiling wherever it is called.
#define HKI_ONCE __attribute__((noinline))

// What is compiled for constants is.
#define HKI_INLINE inline __attribute__((always_inline))

// Loops over a few vectors, which are kept in registers only if it is unrolled.
#define HKI_UNROLL _Pragma("GCC unroll 16")

// Calls `f(i)` for constants i < n: so many vectors stay in registers, unlike in some of those loops.
#define HKI_INLINED __attribute__((always_inline))
template <class F, int... i>
HKI_INLINE void repeat(const F& f, std::integer_sequence<int, i...>) {
  (f(std::integral_constant<int, i>()), ...);
}
template <int n, class F>
HKI_INLINE void repeat(const F& f) {
  repeat(f, std::make_integer_sequence<int, n>());
}

inline void store(float* p, Floats value) { std::memcpy(p, &value, sizeof(value)); }

inline float sum(Floats value) {
  float parts[kLanes];
  std::memcpy(parts, &value, sizeof(value));
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
  return parts[0];
}

// The sums of four vectors.
inline void sum_four(const Floats* values, float* out) {
#if defined(HKI_AVX512)
  const __m512 a = (__m512)values[0], b = (__m512)values[1];
  const __m512 c = (__m512)values[2], d = (__m512)values[3];
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m512 halves = _mm512_add_ps(all, _mm512_shuffle_f32x4(all, all, 0x4e));
  const __m512 whole = _mm512_add_ps(halves, _mm512_shuffle_f32x4(halves, halves, 0xb1));
  _mm_storeu_ps(out, _mm512_castps512_ps128(whole));
#elif defined(HKI_AVX2)
  const __m256 ab = _mm256_hadd_ps((__m256)values[0], (__m256)values[1]);
  const __m256 cd = _mm256_hadd_ps((__m256)values[2], (__m256)values[3]);
  const __m256 all = _mm256_hadd_ps(ab, cd);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
  for (int i = 0; i < 4; ++i) out[i] = sum(values[i]);
#endif
}

// --- codes in registers --------------------------------------------------------------------------

constexpr int kCodes = 32;                // that are decoded together
constexpr int kVectors = kCodes / kLanes;  // of their values
constexpr int kBehind = 128;              // so many bytes behind the codes of a row may be read

typedef uint8_t Codes __attribute__((vector_size(kCodes)));
typedef uint32_t CodeWords __attribute__((vector_size(kCodes)));
typedef uint64_t CodeLongs __attribute__((vector_size(kCodes)));

// (A coarse table is one whose values are bfloat16.)
enum Kind { kTable16, kSigned, kUnsigned, kE4M3, kE5M2, kCoarse16 };

// 8-bit floats are float16 with less digits: e5m2 as they are, e4m3 with another bias of the exponent,
// and with a NaN in place of the largest number.
#if defined(HKI_AVX512) || defined(HKI_AVX2)
typedef int16_t Halves __attribute__((vector_size(kLanes * 4)));

constexpr float kE4M3Unit = 256;  // what its values, as float16, are multiples of

inline Halves as_half(Halves codes, bool e4m3) {
  if (!e4m3) return codes << 8;
  const Halves half = (codes << 7) & (int16_t)0xbf80;
  return half | (((half & 0x3f80) == 0x3f80) & 0x7fff);
}

inline __m128i low_half(Codes codes) { return _mm256_castsi256_si128((__m256i)codes); }
inline __m128i high_half(Codes codes) { return _mm256_extracti128_si256((__m256i)codes, 1); }

// 16 bytes twice; and each element of these at an index.
inline Codes twice(const uint8_t* p) {
  return (Codes)_mm256_broadcastsi128_si256(load<__m128i>(p));
}
inline Codes at_indices(Codes codes, Codes index) {
  return (Codes)_mm256_shuffle_epi8((__m256i)codes, (__m256i)index);
}
#else
constexpr float kE4M3Unit = 1;

inline Codes twice(const uint8_t* p) {
  Codes out;
  std::memcpy(&out, p, 16);
  std::memcpy(reinterpret_cast<uint8_t*>(&out) + 16, p, 16);
  return out;
}
inline Codes at_indices(Codes codes, Codes index) {
  Codes out;
  for (int i = 0; i < kCodes; ++i) out[i] = codes[index[i]];
  return out;
}
#endif

// The bytes of a plane of a group, repeated if they are fewer than those of a vector.
template <int size>
inline CodeWords repeated(const uint8_t* p) {
  if constexpr (size == 4) return CodeWords{} + load<uint32_t>(p);
  if constexpr (size == 8) return (CodeWords)(CodeLongs{} + load<uint64_t>(p));
  if constexpr (size == 16) return (CodeWords)twice(p);
  if constexpr (size == kCodes) return load<CodeWords>(p);
}

// 32 codes of such a plane, from code 32 * i on; or, if it has 32 bytes, code i of each.
template <int bits, int size>
inline Codes codes_in(const uint8_t* p, uint32_t i) {
  constexpr auto of = [](int word) { return uint32_t(4 * word / size * bits); };
  const CodeWords shifts = {of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)};
  const uint32_t step = i * (kCodes / size * bits);
  const CodeWords found = repeated<size>(p);
  return (Codes)(size == kCodes ? found >> step : found >> shifts + step) & (uint8_t)((1 << bits) - 1);
}

// Floats of bytes with or without a sign, and of 8-bit floats.
#if defined(HKI_AVX512)

template <Kind kind>
inline void widened(Codes codes, const float*, Floats (&out)[kVectors]) {
  if constexpr (kind == kE4M3 || kind == kE5M2) {
    const Halves halves = as_half((Halves)_mm512_cvtepi8_epi16((__m256i)codes), kind == kE4M3);
    out[0] = (Floats)_mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)halves));
    out[1] = (Floats)_mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)halves, 1));
  } else {
    for (int v = 0; v < kVectors; ++v) {
      const __m128i part = v ? high_half(codes) : low_half(codes);
      out[v] = (Floats)_mm512_cvtepi32_ps(kind == kSigned ? _mm512_cvtepi8_epi32(part)
                                                          : _mm512_cvtepu8_epi32(part));
    }
  }
}

// 32 codes in words of 32 bits, of which a table needs the lowest.
struct Indices {
  Ints of[kVectors];
};

// 16 of one plane: bytes, repeated if they are fewer, and shifted so that other shifts give all codes.
template <int bits, int size>
inline Ints words(const uint8_t* p) {
  const __m128i bytes = size == 4   ? _mm_set1_epi32(load<int32_t>(p))
                        : size == 8 ? _mm_set1_epi64x(load<int64_t>(p))
                                    : load<__m128i>(p);
  const Ints found = (Ints)_mm512_cvtepu8_epi32(bytes);
  if constexpr (size >= 16) return found;
  Ints shifts;
  for (int i = 0; i < 16; ++i) shifts[i] = i / size * bits;
  return found >> shifts;
}

// Values of a table of 16, and which code each is of.
class Table16 {
 public:
  Table16() = default;
  Table16(const float* table, int64_t bits) {
    for (int i = 0; i < 16; ++i) values_[i] = table[i & ((1 << bits) - 1)];
  }

  bool coarse() const { return true; }  // (fine ones take no longer)
  template <bool known_coarse>
  static int element(int i) { return i; }
  static Codes arranged(Codes codes) { return codes; }
  template <bool known_coarse>
  void look_up(Codes codes, Floats (&out)[kVectors]) const {
    for (int v = 0; v < kVectors; ++v) {
      const __m512i index = _mm512_cvtepu8_epi32(v ? high_half(codes) : low_half(codes));
      out[v] = (Floats)_mm512_permutexvar_ps(index, (__m512)values_);
    }
  }
  template <bool known_coarse>
  void look_up(Indices codes, Floats (&out)[kVectors]) const {
    for (int v = 0; v < kVectors; ++v)
      out[v] = (Floats)_mm512_permutexvar_ps((__m512i)codes.of[v], (__m512)values_);
  }

 private:
  Floats values_;
};

#elif defined(HKI_AVX2)

template <Kind kind>
inline void widened(Codes codes, const float*, Floats (&out)[kVectors]) {
  for (int half = 0; half < 2; ++half) {
    const __m128i part = half ? high_half(codes) : low_half(codes);
    Floats* to = out + 2 * half;
    if constexpr (kind == kE4M3 || kind == kE5M2) {
      const Halves halves = as_half((Halves)_mm256_cvtepi8_epi16(part), kind == kE4M3);
      to[0] = (Floats)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)halves));
      to[1] = (Floats)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)halves, 1));
    } else {
      const __m128i next = _mm_srli_si128(part, 8);
      const bool sign = kind == kSigned;
      to[0] = (Floats)_mm256_cvtepi32_ps(sign ? _mm256_cvtepi8_epi32(part) : _mm256_cvtepu8_epi32(part));
      to[1] = (Floats)_mm256_cvtepi32_ps(sign ? _mm256_cvtepi8_epi32(next) : _mm256_cvtepu8_epi32(next));
    }
  }
}

// Values of a table of 16, looked up byte by byte: each byte of the float has a table of bytes. If all
// values are bfloat16, as small integers are, the two lower ones are zero. Values come in the order in
// which the bytes are put together, of both halves of codes at once: four after four or, if they are known
// to be coarse, of each eight first those with even indices.
class Table16 {
 public:
  Table16() = default;
  Table16(const float* table, int64_t) {
    uint8_t bytes[4][16];
    for (int i = 0; i < 16; ++i)
      for (int byte = 0; byte < 4; ++byte)
        bytes[byte][i] = reinterpret_cast<const uint8_t*>(table + i)[byte];
    for (int byte = 0; byte < 4; ++byte)
      bytes_[byte] = _mm256_broadcastsi128_si256(load<__m128i>(bytes[byte]));
    const __m256i lower = _mm256_or_si256(bytes_[0], bytes_[1]);
    coarse_ = _mm256_testz_si256(lower, lower);
  }

  bool coarse() const { return coarse_; }

  template <bool known_coarse>
  static int element(int i) {
    return known_coarse ? (i & 4) * 4 + (i & 16) / 2 + (i & 3) * 2 + (i & 8) / 8
                        : (i & 4) * 4 + (i & 24) / 2 + (i & 3);
  }

  // So that values that are not known to be coarse are in the order that the codes had.
  static Codes arranged(Codes codes) {
    const __m256i words = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    return (Codes)_mm256_permutevar8x32_epi32((__m256i)codes, words);
  }

  template <bool known_coarse>
  void look_up(Codes codes, Floats (&out)[kVectors]) const {
    __m256i high[2], low[2] = {};
    pairs(codes, bytes_[2], bytes_[3], high);
    if (!known_coarse && !coarse_) pairs(codes, bytes_[0], bytes_[1], low);
    for (int i = 0; i < 2; ++i) {
      out[2 * i] = (Floats)(known_coarse ? _mm256_slli_epi32(high[i], 16)
                                         : _mm256_unpacklo_epi16(low[i], high[i]));
      out[2 * i + 1] = (Floats)(known_coarse ? _mm256_and_si256(high[i], _mm256_set1_epi32(0xffff0000))
                                             : _mm256_unpackhi_epi16(low[i], high[i]));
    }
  }

 private:
  // Two bytes for each code.
  static void pairs(Codes codes, __m256i first, __m256i second, __m256i (&out)[2]) {
    const __m256i a = _mm256_shuffle_epi8(first, (__m256i)codes);
    const __m256i b = _mm256_shuffle_epi8(second, (__m256i)codes);
    out[0] = _mm256_unpacklo_epi8(a, b), out[1] = _mm256_unpackhi_epi8(a, b);
  }

  __m256i bytes_[4];
  bool coarse_;
};

#else

template <Kind kind>
inline void widened(Codes codes, const float* table, Floats (&out)[kVectors]) {
  for (int i = 0; i < kCodes; ++i)
    out[i / kLanes][i % kLanes] = kind == kSigned     ? static_cast<int8_t>(codes[i])
                                  : kind == kUnsigned ? codes[i]
                                                      : table[codes[i]];
}

class Table16 {
 public:
  Table16() = default;
  Table16(const float* table, int64_t) : table_(table) {}

  bool coarse() const { return true; }
  template <bool known_coarse>
  static int element(int i) { return i; }
  static Codes arranged(Codes codes) { return codes; }
  template <bool known_coarse>
  void look_up(Codes codes, Floats (&out)[kVectors]) const {
    for (int i = 0; i < kCodes; ++i) out[i / kLanes][i % kLanes] = table_[codes[i] & 15];
  }

 private:
  const float* table_;
};

#endif

// Floats of bytes with a sign in memory, of which each vector takes one instruction.
inline void widened(const uint8_t* codes, Floats (&out)[kVectors]) {
  for (int v = 0; v < kVectors; ++v) {
    const uint8_t* p = codes + v * kLanes;
#if defined(HKI_AVX512)
    out[v] = (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(p)));
#elif defined(HKI_AVX2)
    out[v] = (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    for (int i = 0; i < kLanes; ++i) out[v][i] = static_cast<int8_t>(p[i]);
#endif
  }
}

// --- codes ---------------------------------------------------------------------------------------

enum Rounding { kNone, kBFloat16, kFloat16 };

// The nearest numbers of a narrower dtype, ties to even.
inline Floats rounded(Floats value, Rounding to) {
  if (to == kNone) return value;
  const int digits = to == kBFloat16 ? 16 : 13;  // that are dropped
  Ints bits = (Ints)value;
  bits += (1 << (digits - 1)) - 1 + ((bits >> digits) & 1);
  const Floats normal = (Floats)((bits >> digits) << digits);
  if (to == kBFloat16) return normal;
  const Floats size = (Floats)((Ints)value & 0x7fffffff), infinity = value * HUGE_VALF;
  // Next to 0.75 the step of float32 is that of float16's smallest numbers.
  const Floats small = value + 0.75f - 0.75f;
  return size < 0x1p-14f ? small : size >= 65520 ? infinity : size == size ? normal : value;
}

// Numbers as they are stored, read as float32.
struct Numbers {
  const void* data;
  XLA_FFI_DataType dtype;

  float operator[](int64_t i) const {
    if (dtype == XLA_FFI_DataType_F32) return static_cast<const float*>(data)[i];
    const uint32_t bits = static_cast<const uint16_t*>(data)[i];
    if (dtype == XLA_FFI_DataType_BF16) return as_float(bits << 16);
#if defined(HKI_AVX512) || defined(HKI_AVX2)
    return _cvtsh_ss(static_cast<uint16_t>(bits));
#else
    const uint32_t sign = (bits & 0x8000) << 16, size = (bits & 0x7fff) << 13;
    const bool finite = (bits & 0x7c00) != 0x7c00;  // the exponent has another bias
    const float value = finite ? as_float(size) * 0x1p112f : as_float(size | 0x7f800000);
    return sign ? -value : value;
#endif
  }

  // `count` of them from `first` on; in `memory`, if they have to be converted.
  HKI_ONCE const float* floats(int64_t first, int64_t count, float* memory) const {
    if (dtype == XLA_FFI_DataType_F32) return static_cast<const float*>(data) + first;
    const uint16_t* bits = static_cast<const uint16_t*>(data) + first;
    int64_t i = 0;
    if (dtype == XLA_FFI_DataType_BF16)
      for (; i < count; ++i) memory[i] = as_float(static_cast<uint32_t>(bits[i]) << 16);
#if defined(HKI_AVX512)
    for (; i < count; i += 16) {
      const __mmask16 present = count - i < 16 ? (1 << (count - i)) - 1 : 0xffff;
      const __m256i part = _mm256_maskz_loadu_epi16(present, bits + i);
      _mm512_mask_storeu_ps(memory + i, present, _mm512_cvtph_ps(part));
    }
#elif defined(HKI_AVX2)
    for (; i + 8 <= count; i += 8)
      _mm256_storeu_ps(memory + i, _mm256_cvtph_ps(load<__m128i>(bits + i)));
#endif
    for (; i < count; ++i) memory[i] = (*this)[first + i];
    return memory;
  }

  // The same, always in `out`.
  HKI_ONCE void read(int64_t first, int64_t count, float* out) const {
    const float* found = floats(first, count, out);
    if (found != out) std::copy_n(found, count, out);
  }

  // Asks for the memory of `count` of them, of which the first is so many on. (Inline: GCC drops calls of functions
  // that only ask for memory.)
  HKI_INLINE void prefetch(int64_t first, int64_t count) const {
    const int64_t size = dtype == XLA_FFI_DataType_F32 ? 4 : 2;
    const char* at = static_cast<const char*>(data) + first * size;
    for (int64_t i = 0; i < count * size; i += 64) __builtin_prefetch(at + i, 0, 2);
  }

  static float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }

  static int32_t bits_of(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
  }

  // Those of an array from an element on; none if it is empty.
  static Numbers of(const Array& array, int64_t first) {
    const int64_t size = array.dtype == XLA_FFI_DataType_F32 ? 4 : 2;
    const char* data = static_cast<const char*>(array.data);
    return {array.size() ? data + first * size : nullptr, array.dtype};
  }
};

// The root of the smallest normal number: scales in `quantized.operands` are no smaller either.
constexpr float kSmallestScale = 0x1p-63f;

// The scale of activations that are rounded to 8 bits: the largest magnitude is 127.5 steps. NaN where an element
// is not finite.
HKI_INLINE float scale_of_row(const float* x, int64_t length) {
  int32_t largest = 0;
  for (int64_t k = 0; k < length; ++k) largest = std::max(largest, Numbers::bits_of(x[k]) & 0x7fffffff);
  if (largest >= 0x7f800000) return NAN;
  return std::max(Numbers::as_float(largest) * (float)(1 / 127.5), kSmallestScale);
}

// The nearest of the codes -128 to 127, ties to even.
HKI_INLINE int32_t nearest_code(float steps) { return static_cast<int32_t>(std::min(std::rint(steps), 127.0f)); }

// The axes of codes, scales and offsets [..., last] that a batch of matrices has, and then that of the
// rows. Vectors along the last one are counted in the order of memory.
struct Layout {
  List<int64_t> dimensions, order;

  int64_t axis(int64_t i) const { return dimensions[order[i]]; }
  int64_t rows() const { return axis(order.size - 1); }
  // How many vectors on the next index of an axis is.
  int64_t step(int64_t i) const {
    int64_t vectors = 1;
    for (int64_t inner = order[i] + 1; inner + 1 < dimensions.size; ++inner)
      vectors *= dimensions[inner];
    return vectors;
  }
  int64_t step() const { return step(order.size - 1); }
  // The vector that a matrix of the batch starts with.
  int64_t first(int64_t b) const {
    int64_t vector = 0;
    for (int64_t i = order.size - 1; i-- > 0; b /= axis(i)) vector += b % axis(i) * step(i);
    return vector;
  }
};

// Up to 32 codes of a group, from `first` on, in registers: for each plane, at which byte of the group
// they start, and by how many bits they are shifted there.
struct Block {
  int32_t first, width, at[2];
  uint32_t shift[2];
};

// One matrix. Rows are so many (`step`) vectors apart.
struct Weights {
  const uint8_t* codes;  // [rows, stored]
  Numbers scale;         // [rows, groups]
  Numbers offset;        // the same, or null
  int64_t rows, step, length, stored, groups, group;
  const float* table;  // the value of each code
  int32_t bias;        // what is subtracted from codes to get integers with a sign
  Rounding rounding;   // of the values
  int64_t planes[2];   // how many bits of a code each has, lowest first; 0 if there is no second one

  // Of codes [..., stored] and scales [..., groups]. What else there is, is set later.
  Weights(const Array& codes, const Array& scale, const Layout& layout, List<int64_t> of_planes)
      : codes(static_cast<const uint8_t*>(codes.data)),
        rows(layout.rows()),
        step(layout.step()),
        stored(codes.shape.back()),
        groups(scale.shape.back()) {
    std::copy_n(of_planes.data, 2, planes);
    group = stored * 8 / bits() / groups;
  }

  // The matrix that starts with a vector.
  Weights from(int64_t first, const Array& scales, const Array& offsets) const {
    Weights one = *this;
    one.codes += first * stored;
    one.scale = Numbers::of(scales, first * groups);
    one.offset = Numbers::of(offsets, first * groups);
    return one;
  }

  int64_t bits() const { return planes[0] + planes[1]; }
  int64_t row_bytes() const { return step * stored; }  // from one row to the next
  const uint8_t* end() const { return codes + (rows - 1) * row_bytes() + stored; }
  // The codes of a row, and `kBehind` bytes; in `memory`, if so many do not follow.
  const uint8_t* codes_of(int64_t row, uint8_t* memory) const {
    const uint8_t* found = codes + row * row_bytes();
    if (end() - found >= stored + kBehind) return found;
    return static_cast<const uint8_t*>(std::memcpy(memory, found, stored));
  }
  int64_t padded() const { return round_up(stored + kBehind, 64); }  // the bytes of that memory
  int64_t scales_before(int64_t row) const { return row * step * groups; }
  float scale_at(int64_t row, int64_t group) const { return scale[scales_before(row) + group]; }
  float offset_at(int64_t row, int64_t group) const {
    return offset.data ? offset[scales_before(row) + group] : 0;
  }
  bool nibbles() const { return planes[0] == 4 && planes[1] == 0; }
};

// Scales and offsets of a span of rows, converted to float32 together: one row has so few that calls take
// longer than conversions. Whole vectors may be read; what is behind the groups of a row has no meaning.
class Span {
 public:
  explicit Span(const Weights& w)
      : w_(w), rows_(std::clamp<int64_t>(kScales / w.groups / kUnit * kUnit, kUnit, kMost)) {
    for (int i = 0; i < kLanes; ++i) tail_[i] = i < w.groups % kLanes ? -1 : 0;
  }

  int64_t rows() const { return rows_; }
  int64_t size() const { return 2 * (rows_ * w_.groups + kLanes); }  // of its memory
  void place(float* memory) {
    memory_ = memory;
    if (!w_.offset.data) offsets_ = std::fill_n(memory + size() / 2, w_.groups, 0.0f) - w_.groups;
  }

  // Reads those of rows from `first` on, which starts a span, up to row `last`.
  void read(int64_t first, int64_t last) {
    first_ = first;
    scales_ = read(w_.scale, last, memory_);
    if (w_.offset.data) offsets_ = read(w_.offset, last, memory_ + size() / 2);
  }

  const float* scales(int64_t row) const { return scales_ + (row - first_) * w_.groups; }
  const float* offsets(int64_t row) const {
    return offsets_ + (w_.offset.data ? (row - first_) * w_.groups : 0);
  }

  // Adds the products of the offsets of R rows with what stands beside them in `of_x`.
  template <int R>
  HKI_INLINE void add_offsets(int64_t row, const float* of_x, Floats* totals) const {
    const float* of_row = offsets(row);
    const int64_t groups = w_.groups;
    int64_t i = 0;
    for (; i + kLanes <= groups; i += kLanes)
      HKI_UNROLL
      for (int r = 0; r < R; ++r)
        totals[r] += load<Floats>(of_row + r * groups + i) * load<Floats>(of_x + i);
    if (i < groups)
      HKI_UNROLL
      for (int r = 0; r < R; ++r)
        totals[r] += (Floats)(load<Ints>(of_row + r * groups + i) & tail_) * load<Floats>(of_x + i);
  }

 private:
  // The scales that are near at a time, the most rows, and those that are multiplied together.
  static constexpr int64_t kScales = 1024, kMost = 32, kUnit = 4;

  // Float32 is not copied, unless there is too little behind it.
  const float* read(const Numbers& numbers, int64_t last, float* memory) const {
    const int64_t at = w_.scales_before(first_), count = std::min(rows_, last - first_);
    const bool enough = (w_.rows - first_ - rows_) * w_.groups >= kLanes;
    if (numbers.dtype == XLA_FFI_DataType_F32 && w_.step == 1 && enough)
      return static_cast<const float*>(numbers.data) + at;
    if (numbers.dtype == XLA_FFI_DataType_F32 && w_.groups == 1) {
      const float* from = static_cast<const float*>(numbers.data) + at;
      for (int64_t i = 0; i < count; ++i) memory[i] = from[i * w_.step];
      return memory;
    }
    const int64_t some = w_.step == 1 ? count : 1;  // rows that are stored one after another
    for (int64_t i = 0; i < count; i += some)
      numbers.read(at + w_.scales_before(i), some * w_.groups, memory + i * w_.groups);
    numbers.prefetch(at + w_.scales_before(rows_), count * w_.groups);  // the next ones
    return memory;
  }

  const Weights& w_;
  int64_t rows_, first_ = 0;
  float* memory_ = nullptr;
  const float *scales_ = nullptr, *offsets_ = nullptr;
  Ints tail_;  // which elements of its last vector a row has
};

// How the codes of a group are read, 32 at a time, for planes of any bits. Byte j of a plane of `size`
// bytes has codes j, j + size, j + 2 * size ... So 32 bytes, shifted, are 32 codes; or, in planes that are
// smaller, the bytes are repeated and each four of them are shifted by their own number of bits. Groups for
// which that does not come out even are read piece by piece: a piece is `size` codes.
class Blocks {
 public:
  explicit Blocks(const Weights& w) : group_bytes_(w.stored / w.groups) {
    int64_t at = 0;
    bool even = true;
    for (int i = 0; i < 2 && w.planes[i]; ++i) {
      planes_[i].bits = w.planes[i], planes_[i].size = w.group * w.planes[i] / 8, planes_[i].at = at;
      at += planes_[i].size;
      even &= planes_[i].fits();
      ++count_;
    }
    piece_ = even ? w.group : planes_[count_ - 1].size;
    in_piece_ = (piece_ + kCodes - 1) / kCodes;
    size_ = w.group / piece_ * in_piece_;
    blocks_ = reinterpret_cast<Block*>(scratch<2>(size_ * sizeof(Block) / sizeof(float)));
    for (int64_t i = 0; i < size_; ++i) blocks_[i] = block(i);
    for (int i = 0; i < count_; ++i) planes_[i].prepare(even);
  }

  int64_t size() const { return size_; }  // of a group
  const Block& operator[](int64_t i) const { return blocks_[i]; }
  // The block that has a code of a group.
  int64_t of(int64_t code) const { return code / piece_ * in_piece_ + code % piece_ / kCodes; }

  // Its codes; what is behind the last one is of no meaning.
  Codes codes(const uint8_t* group, const Block& block) const {
    const Codes low = planes_[0].codes(group + block.at[0], block.shift[0]);
    if (count_ == 1) return low;
    const Codes high = planes_[1].codes(group + block.at[1], block.shift[1]);
    return low | (Codes)((CodeWords)high << (uint32_t)planes_[0].bits);
  }

  // The codes of `groups` groups, less a bias, one in each byte, with zeros up to whole blocks.
  HKI_ONCE void unpack(const uint8_t* stored, int64_t groups, uint8_t* out, uint8_t bias) const {
    for (; groups; --groups, stored += group_bytes_)
      for (int64_t i = 0; i < size_; ++i, out += kCodes) {
        const Codes found = codes(stored, blocks_[i]) - bias;
        std::memcpy(out, &found, kCodes);
        std::fill(out + blocks_[i].width, out + kCodes, 0);
      }
  }

 private:
  struct Plane {
    int64_t bits, size, at;
    enum { kWhole, kSpread, kTiny } how;
    Codes index = {}, mask;
    CodeWords shifts;

    // Whether blocks may start at each 32nd code.
    bool fits() const { return size % kCodes == 0 || bits == 8 || (size <= 16 && kCodes % size == 0); }

    void prepare(bool even) {
      how = !even || size % kCodes == 0 || bits == 8 ? kWhole : size >= 4 ? kSpread : kTiny;
      shifts = CodeWords{};
      for (int i = 0; i < kCodes; ++i) {
        mask[i] = (1 << bits) - 1;
        if (how == kWhole) continue;
        index[i] = i % size;
        shifts[i / 4] = std::min<int64_t>(i / 4 * 4 / size * bits, 24);  // (more is of no code)
      }
    }

    Codes codes(const uint8_t* p, uint32_t shift) const {
      if (how == kWhole) {
        const Codes found = load<Codes>(p);
        return bits == 8 ? found : (Codes)((CodeWords)found >> shift) & mask;
      }
      const Codes found = how == kSpread ? at_indices(twice(p), index) : tiny(p);
      return (Codes)((CodeWords)found >> (shifts + shift)) & mask;
    }

    // One or two bytes, repeated so that each four have their own shifts.
    Codes tiny(const uint8_t* p) const {
      const uint32_t a = p[0], b = size == 2 ? p[1] : a >> bits;
      const uint32_t next = (size == 2 ? bits : 2 * bits);  // of the same bytes
      return (Codes)(CodeWords{} + (a | b << 8 | a >> next << 16 | b >> next << 24));
    }
  };

  Block block(int64_t i) const {
    Block found;
    found.first = i / in_piece_ * piece_ + i % in_piece_ * kCodes;
    found.width = std::min<int64_t>(kCodes, piece_ - i % in_piece_ * kCodes);
    for (int p = 0; p < count_; ++p) {
      found.at[p] = planes_[p].at + found.first % planes_[p].size;
      found.shift[p] = found.first / planes_[p].size * planes_[p].bits;
    }
    return found;
  }

  Plane planes_[2];
  int count_ = 0;
  int64_t group_bytes_, piece_, in_piece_, size_;
  Block* blocks_;
};

// Values of codes of one group.
template <Kind kind>
class Decoder {
  static constexpr bool in_table = kind == kTable16 || kind == kCoarse16;

 public:
  Decoder() = default;
  explicit Decoder(const Weights& w) : table_(w.table), bias_(w.bias), rounding_(w.rounding) {
    if constexpr (in_table) values_ = Table16(table_, w.bits());
  }

  // Which of 32 codes value i is of.
  static int element(int i) { return in_table ? Table16::element<kind == kCoarse16>(i) : i; }
  static Codes arranged(Codes codes) { return in_table ? Table16::arranged(codes) : codes; }

  // The values before they are scaled, as multiples of `kUnit`.
  static constexpr float kUnit = kind == kE4M3 ? kE4M3Unit : 1;
  template <class Found>
  void operator()(Found codes, Floats (&out)[kVectors]) const {
    if constexpr (in_table)
      values_.look_up<kind == kCoarse16>(codes, out);
    else
      widened<kind>(kind == kSigned ? codes - bias_ : codes, table_, out);
  }

  void operator()(const uint8_t* codes, Floats (&out)[kVectors]) const { widened(codes, out); }

  // As the dense matrix has it.
  Floats exact(Floats value, float scale, float offset) const {
    return rounded(value * kUnit * scale + offset, rounding_);
  }

 private:
  const float* table_;
  uint8_t bias_;
  Rounding rounding_;
  Table16 values_;
};

// By so many bytes at least codes are asked for before they are read, and by the second cache: more
// of its misses may be pending at a time than of the first one's.
constexpr int64_t kAhead = 8192;
inline void ask_for(const uint8_t* p, int64_t size, int64_t step) {
  for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(p + i * step, 0, 2);
}

// Values [first, last) of a row.
template <Kind kind>
void decode_row(const Weights& w, const Blocks& blocks, int64_t row, int64_t first, int64_t last,
                float* out) {
  const Decoder<kind> decode(w);
  const int64_t group_bytes = w.stored / w.groups, ahead = 4 * w.row_bytes();
  int64_t group = first / w.group, start = first - group * w.group;
  const uint8_t* stored = w.codes_of(row, reinterpret_cast<uint8_t*>(scratch<3>(w.padded() / 4)));
  for (stored += group * group_bytes; first < last; ++group, start = 0, stored += group_bytes) {
    const int64_t stop = std::min(w.group, start + last - first);
    const float scale = w.scale_at(row, group), offset = w.offset_at(row, group);
    const Block* block = &blocks[start ? blocks.of(start) : 0];
    for (int64_t at = start; at < stop; ++block) {
      __builtin_prefetch(stored + block->at[0] + ahead);
      if (w.planes[1]) __builtin_prefetch(stored + block->at[1] + ahead);
      Floats values[kVectors];
      decode(decode.arranged(blocks.codes(stored, *block)), values);
      HKI_UNROLL
      for (int v = 0; v < kVectors; ++v) values[v] = decode.exact(values[v], scale, offset);
      const int64_t end = std::min<int64_t>(stop, block->first + block->width);
      if (end - at == kCodes) {
        std::memcpy(out, values, sizeof(values));
      } else {
        float all[kCodes];
        std::memcpy(all, values, sizeof(values));
        std::copy_n(all + at - block->first, end - at, out);
      }
      out += end - at;
      at = end;
    }
    first += stop - start;
  }
}

}  // namespace

#endif  // HAIKU_IMPLICIT_KERNELS_CODES_H_
