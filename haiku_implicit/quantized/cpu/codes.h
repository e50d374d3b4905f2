// Codes of few bits, and the values that they stand for, in vectors as wide as the CPU's.

#ifndef HAIKU_IMPLICIT_KERNELS_CODES_H_
#define HAIKU_IMPLICIT_KERNELS_CODES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "call.h"

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
typedef int16_t Shorts __attribute__((vector_size(kLanes * 2)));
typedef int8_t SignedBytes __attribute__((vector_size(kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

template <typename T>
inline T load(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// What is called once for many products is not worth compiling wherever it is called.
#define HKI_ONCE __attribute__((noinline))

inline void store(float* p, Floats value) { std::memcpy(p, &value, sizeof(value)); }

// The first `count` of a vector's elements; the others are zero.
template <typename T, typename Element>
inline T load_part(const Element* p, int64_t count) {
  T value{};
  std::memcpy(&value, p, std::min<int64_t>(count, kLanes) * sizeof(Element));
  return value;
}

inline void store_part(float* p, Floats value, int64_t count) {
  std::memcpy(p, &value, std::min<int64_t>(count, kLanes) * sizeof(float));
}

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

// What compilers do not find for vectors of any width: integers from bytes, values of a table of 16,
// and those of 8-bit floats. These are float16 with less digits: e5m2 as they are, e4m3 with another
// bias of the exponent, and with a NaN in place of the largest number.
#if defined(HKI_AVX512) || defined(HKI_AVX2)
constexpr float kE4M3Unit = 256;  // what its values, as float16, are multiples of

inline Shorts as_half(Shorts codes, bool e4m3) {
  if (!e4m3) return codes << 8;
  const Shorts half = (codes << 7) & (int16_t)0xbf80;
  return half | (((half & 0x3f80) == 0x3f80) & 0x7fff);
}
#endif

#if defined(HKI_AVX512)

inline Ints widened(Bytes codes) { return (Ints)_mm512_cvtepu8_epi32((__m128i)codes); }
inline Ints widened(SignedBytes codes) { return (Ints)_mm512_cvtepi8_epi32((__m128i)codes); }

inline Floats lookup16(const Floats* table, Ints codes) {
  return (Floats)_mm512_permutexvar_ps((__m512i)codes, (__m512)table[0]);
}

template <bool e4m3>
inline Floats from_float8(Bytes codes, const float*) {
  const Shorts half = as_half((Shorts)_mm256_cvtepi8_epi16((__m128i)codes), e4m3);
  return (Floats)_mm512_cvtph_ps((__m256i)half);
}

#elif defined(HKI_AVX2)

inline __m128i low_half(Bytes codes) { return _mm_cvtsi64_si128(load<int64_t>(&codes)); }
inline Ints widened(Bytes codes) { return (Ints)_mm256_cvtepu8_epi32(low_half(codes)); }
inline Ints widened(SignedBytes codes) { return (Ints)_mm256_cvtepi8_epi32(low_half((Bytes)codes)); }

inline Floats lookup16(const Floats* table, Ints codes) {
  const __m256 low = _mm256_permutevar8x32_ps((__m256)table[0], (__m256i)codes);
  const __m256 high = _mm256_permutevar8x32_ps((__m256)table[1], (__m256i)codes);
  return (Floats)_mm256_blendv_ps(low, high, (__m256)(codes << 28));
}

template <bool e4m3>
inline Floats from_float8(Bytes codes, const float*) {
  const Shorts half = as_half((Shorts)_mm_cvtepi8_epi16(low_half(codes)), e4m3);
  return (Floats)_mm256_cvtph_ps((__m128i)half);
}

#else

constexpr float kE4M3Unit = 1;

inline Ints widened(Bytes codes) { return __builtin_convertvector(codes, Ints); }
inline Ints widened(SignedBytes codes) { return __builtin_convertvector(codes, Ints); }

inline Floats gathered(const float* table, Ints index) {
  Floats out;
  for (int i = 0; i < kLanes; ++i) out[i] = table[index[i]];
  return out;
}

inline Floats lookup16(const Floats* table, Ints codes) {
  return gathered((const float*)table, codes & 15);
}

template <bool e4m3>
inline Floats from_float8(Bytes codes, const float* table) {
  return gathered(table, widened(codes));
}

#endif

// --- codes ---------------------------------------------------------------------------------------

enum Kind { kTable16, kSigned, kUnsigned, kE4M3, kE5M2 };
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

  // The same with zeros up to whole vectors.
  HKI_ONCE void read(int64_t first, int64_t count, float* out) const {
    const float* found = floats(first, count, out);
    if (found != out) std::copy_n(found, count, out);
    std::fill(out + count, out + round_up(count, kLanes), 0.0f);
  }

  // Asks for the memory of `count` of them, of which the first is so many on.
  void prefetch(int64_t first, int64_t count) const {
    const int64_t size = dtype == XLA_FFI_DataType_F32 ? 4 : 2;
    const char* at = static_cast<const char*>(data) + first * size;
    for (int64_t i = 0; i < count * size; i += 64) __builtin_prefetch(at + i);
  }

  static float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }

  // Those of an array from an element on; none if it is empty.
  static Numbers of(const Array& array, int64_t first) {
    const int64_t size = array.dtype == XLA_FFI_DataType_F32 ? 4 : 2;
    const char* data = static_cast<const char*>(array.data);
    return {array.size() ? data + first * size : nullptr, array.dtype};
  }
};

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

// One matrix. Rows are so many (`step`) vectors apart.
struct Weights {
  const uint8_t* codes;  // [rows, stored]
  Numbers scale;         // [rows, groups]
  Numbers offset;        // the same, or null
  int64_t rows, step, length, stored, groups, group;
  const float* table;  // the value of each code
  int32_t bias;        // what is subtracted from unsigned codes
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
  int64_t scales_before(int64_t row) const { return row * step * groups; }
  float scale_at(int64_t row, int64_t group) const { return scale[scales_before(row) + group]; }
  float offset_at(int64_t row, int64_t group) const {
    return offset.data ? offset[scales_before(row) + group] : 0;
  }
  // The scales of `count` rows, one after another; in `memory`, if they are not stored so.
  HKI_ONCE const float* scales(int64_t row, int64_t count, float* memory) const {
    if (step == 1) return scale.floats(row * groups, count * groups, memory);
    for (int64_t i = 0; i < count; ++i)
      for (int64_t group = 0; group < groups; ++group)
        memory[i * groups + group] = scale_at(row + i, group);
    return memory;
  }
  bool nibbles() const { return planes[0] == 4 && planes[1] == 0; }
  // Whether the codes of each group are whole vectors, of bytes or of pairs in bytes.
  bool whole() const {
    if (length != groups * group) return false;
    return nibbles() ? group % (2 * kLanes) == 0 : bits() == 8 && group % kLanes == 0;
  }
};

// Values of codes of one group.
template <Kind kind>
class Decoder {
 public:
  Decoder() = default;
  explicit Decoder(const Weights& w) : table_(w.table), bias_(w.bias), rounding_(w.rounding) {
    if constexpr (kind == kTable16) std::memcpy(values_, table_, sizeof(values_));
  }

  // Goes on to a group with this scale and offset.
  void start(float scale, float offset) {
    scale_ = scale;
    offset_ = offset;
    if constexpr (kind == kE4M3) {
      large_ = !(std::abs(scale) < 0x1p119f);
      if (!large_) scale_ *= kE4M3Unit;
    }
    if constexpr (kind == kTable16)
      for (int i = 0; i < 16 / kLanes; ++i)
        scaled_[i] = rounded(values_[i] * scale + offset, rounding_);
  }

  // Of one code in each byte, or of the four bits from `shift` on.
  Floats operator()(Bytes codes, int shift = 0) const {
    if constexpr (kind == kTable16) return lookup16(scaled_, widened(codes) >> shift);
    if (kind == kE4M3 && large_) return value(codes) * kE4M3Unit * scale_ + offset_;
    return value(codes) * scale_ + offset_;
  }

  // The same as the dense matrix has it.
  Floats exact(Bytes codes, int shift) const {
    const Floats value = (*this)(codes, shift);  // (that of a table is rounded already)
    return kind == kTable16 ? value : rounded(value, rounding_);
  }

  // The same before it is scaled, as a multiple of `kUnit`.
  static constexpr float kUnit = kind == kE4M3 ? kE4M3Unit : 1;
  Floats value(Bytes codes, int shift = 0) const {
    if constexpr (kind == kTable16)
      return lookup16(values_, widened(codes) >> shift);
    else if constexpr (kind == kSigned)
      return __builtin_convertvector(widened((SignedBytes)codes), Floats);
    else if constexpr (kind == kUnsigned)
      return __builtin_convertvector(widened(codes) - bias_, Floats);
    else
      return from_float8<kind == kE4M3>(codes, table_);
  }

  void operator()(const uint8_t* codes, int shift, int64_t count, float* out) const {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
      store(out + i, (*this)(load<Bytes>(codes + i), shift));
    if (i < count)
      store_part(out + i, (*this)(load_part<Bytes>(codes + i, count - i), shift), count - i);
  }

 private:
  const float* table_;
  int32_t bias_;
  Rounding rounding_;
  bool large_;  // whether the scale times the unit may be infinite
  float scale_, offset_;
  Floats values_[16 / kLanes], scaled_[16 / kLanes];  // of all codes of four bits
};

// Codes [first, last) of the group that is stored at `stored`, one in each byte of `out`.
void unpack(const Weights& w, const uint8_t* stored, int64_t first, int64_t last,
            uint8_t* __restrict out) {
  std::memset(out, 0, last - first);
  int below = 0;
  for (int64_t bits : w.planes) {
    if (bits == 0) break;
    int64_t size = w.group * bits / 8;
    for (int64_t shift = 0, begin = 0; shift < 8; shift += bits, begin += size) {
      int64_t start = std::max(first, begin), stop = std::min(last, begin + size);
      const uint8_t* in = stored + start - begin;
      for (int64_t j = 0; j < stop - start; ++j)
        out[start - first + j] |= ((in[j] >> shift) & ((1 << bits) - 1)) << below;
    }
    stored += size;
    below += bits;
  }
}

// By so many bytes at least codes are asked for before they are read, and by the second cache: more
// of its misses may be pending at a time than of the first one's.
constexpr int64_t kAhead = 8192;
inline void ask_for(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

// Memory that is read soon. Rows are far apart, where only parts of them are read.
inline void prefetch(const uint8_t* p, int64_t size) {
  for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(p + i);
}

// Values [first, last) of a row.
template <Kind kind>
void decode_row(const Weights& w, int64_t row, int64_t first, int64_t last, float* out) {
  Decoder<kind> decode(w);
  const bool nibbles = w.nibbles(), bytes = w.bits() == 8, whole = w.whole();
  const int64_t group_bytes = w.stored / w.groups, ahead = 4 * w.row_bytes();
  int64_t group = first / w.group, start = first - group * w.group;
  const uint8_t* stored = w.codes + row * w.row_bytes() + group * group_bytes;
  for (; first < last; ++group, start = 0, stored += group_bytes) {
    const int64_t stop = std::min(w.group, start + last - first);
    decode.start(w.scale_at(row, group), w.offset_at(row, group));
    if (whole && stop - start == w.group) {
      prefetch(stored + ahead, group_bytes);
      for (int64_t i = 0; i < group_bytes; i += kLanes) {
        const Bytes codes = load<Bytes>(stored + i);
        store(out + i, decode(codes));
        if (kind == kTable16) store(out + i + group_bytes, decode(codes, 4));
      }
    } else if (bytes) {
      prefetch(stored + start + ahead, stop - start);
      decode(stored + start, 0, stop - start, out);
    } else if (nibbles) {
      const int64_t half = w.group / 2, low = std::min(stop, half), high = std::max(start, half);
      if (start < low) prefetch(stored + start + ahead, low - start);
      if (high < stop) prefetch(stored + high - half + ahead, stop - high);
      if (start < low) decode(stored + start, 0, low - start, out);
      if (high < stop) decode(stored + high - half, 4, stop - high, out + high - start);
    } else {
      uint8_t codes[512];
      for (int64_t at = start; at < stop; at += sizeof(codes)) {
        const int64_t count = std::min<int64_t>(stop - at, sizeof(codes));
        unpack(w, stored, at, at + count, codes);
        decode(codes, 0, count, out + at - start);
      }
    }
    if (kind != kTable16 && w.rounding) {
      int64_t i = 0, count = stop - start;
      for (; i + kLanes <= count; i += kLanes)
        store(out + i, rounded(load<Floats>(out + i), w.rounding));
      if (i < count)
        store_part(out + i, rounded(load_part<Floats>(out + i, count - i), w.rounding), count - i);
    }
    out += stop - start;
    first += stop - start;
  }
}

using DecodeRow = void (*)(const Weights&, int64_t, int64_t, int64_t, float*);
constexpr DecodeRow kDecodeRow[] = {decode_row<kTable16>, decode_row<kSigned>,
                                    decode_row<kUnsigned>, decode_row<kE4M3>, decode_row<kE5M2>};

}  // namespace

#endif  // HAIKU_IMPLICIT_KERNELS_CODES_H_
