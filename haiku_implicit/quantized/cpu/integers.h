// Integer codes of a matrix, and activations that are rounded to integers.

#ifndef HAIKU_IMPLICIT_KERNELS_INTEGERS_H_
#define HAIKU_IMPLICIT_KERNELS_INTEGERS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "codes.h"
#include "threads.h"

namespace {

constexpr int64_t kWide = 4 * kLanes;  // the bytes of a vector

typedef uint8_t Wide __attribute__((vector_size(kWide)));
typedef int16_t Words __attribute__((vector_size(kWide)));
typedef uint16_t UnsignedWords __attribute__((vector_size(kWide)));

#if defined(HKI_AVX512) && defined(__AVX512VNNI__)
#define HKI_VNNI
#endif

// Sums of two products of bytes each, of which the first ones have no sign, in 16 bits; the sums of two
// of these, times a unit.
#if defined(HKI_AVX512)
inline Words pairs(Wide a, Wide b) { return (Words)_mm512_maddubs_epi16((__m512i)a, (__m512i)b); }
inline Ints of_pairs(Words a, int unit = 1) {
  return (Ints)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi16(unit));
}
#elif defined(HKI_AVX2)
inline Words pairs(Wide a, Wide b) { return (Words)_mm256_maddubs_epi16((__m256i)a, (__m256i)b); }
inline Ints of_pairs(Words a, int unit = 1) {
  return (Ints)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi16(unit));
}
#endif

// Adds four products of bytes to each element. The first factors have no sign.
inline Ints add_products(Ints to, Wide a, Wide b) {
#if defined(HKI_VNNI)
  return (Ints)_mm512_dpbusd_epi32((__m512i)to, (__m512i)a, (__m512i)b);
#elif defined(HKI_AVX512) || defined(HKI_AVX2)
  const Words even = (Words)a & 0xff, odd = (Words)((UnsignedWords)a >> 8);
  const Words of_even = (Words)b << 8 >> 8, of_odd = (Words)b >> 8;
#if defined(HKI_AVX512)
  return to + (Ints)_mm512_madd_epi16((__m512i)even, (__m512i)of_even) +
         (Ints)_mm512_madd_epi16((__m512i)odd, (__m512i)of_odd);
#else
  return to + (Ints)_mm256_madd_epi16((__m256i)even, (__m256i)of_even) +
         (Ints)_mm256_madd_epi16((__m256i)odd, (__m256i)of_odd);
#endif
#else
  for (int shift = 0; shift < 32; shift += 8)
    to += ((Ints)a >> shift & 0xff) * ((Ints)b << (24 - shift) >> 24);
  return to;
#endif
}

// The same for two vectors. Four products of codes up to 63 and bytes with a sign fit 16 bits: their sum is
// at most 4 * 63 * 128 = 32256.
constexpr int64_t kSmall = 63;
inline Ints add_small_products(Ints to, const Wide* a, const Wide* b) {
#if !defined(HKI_VNNI) && (defined(HKI_AVX512) || defined(HKI_AVX2))
  return to + of_pairs(pairs(a[0], b[0]) + pairs(a[1], b[1]));
#else
  return add_products(add_products(to, a[0], b[0]), a[1], b[1]);
#endif
}

// The same for P vectors of bytes that are the three digits of numbers, the first ones first. Eight products with
// values up to this one fit, and 16 with values of three bits.
constexpr int64_t kLargestOfDigits = 24;
template <int P>
inline Ints add_small_products_of_digits(Ints to, const Wide* a, const Wide (*b)[P]) {
#if !defined(HKI_VNNI) && (defined(HKI_AVX512) || defined(HKI_AVX2))
  const auto products = [&](int digit) HKI_INLINED {
    Words sums = pairs(a[0], b[digit][0]);
    HKI_UNROLL
    for (int p = 1; p < P; ++p) sums += pairs(a[p], b[digit][p]);
    return sums;
  };
  const Ints upper = of_pairs(products(0), 256) + of_pairs(products(1));
  return to + (upper << 8) + of_pairs(products(2));
#else
  Ints upper = {};
  HKI_UNROLL
  for (int p = 0; p < P; ++p) upper = add_products(upper, a[p], b[0][p]);
  upper <<= 8;
  HKI_UNROLL
  for (int p = 0; p < P; ++p) upper = add_products(upper, a[p], b[1][p]);
  to += upper << 8;
  HKI_UNROLL
  for (int p = 0; p < P; ++p) to = add_products(to, a[p], b[2][p]);
  return to;
#endif
}

// The bytes of a table of 16 (repeated) at indices below 16.
inline Wide lookup(Wide table, Wide index) {
#if defined(HKI_AVX512)
  return (Wide)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
#elif defined(HKI_AVX2)
  return (Wide)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
#else
  Wide out;
  for (int i = 0; i < kWide; ++i) out[i] = table[index[i]];
  return out;
#endif
}

// The elements at indices, below twice those of a vector, in memory. (Two vectors are read.)
inline Wide picked(const uint8_t* p, Ints index) {
#if defined(HKI_AVX512)
  return (Wide)_mm512_permutex2var_epi32(load<__m512i>(p), (__m512i)index, load<__m512i>(p + kWide));
#elif defined(HKI_AVX2)
  const __m256i low = _mm256_permutevar8x32_epi32(load<__m256i>(p), (__m256i)index);
  const __m256i high = _mm256_permutevar8x32_epi32(load<__m256i>(p + kWide), (__m256i)index);
  return (Wide)_mm256_blendv_epi8(low, high, (__m256i)(index >= kLanes));
#else
  Ints out;
  for (int i = 0; i < kLanes; ++i) out[i] = load<int32_t>(p + 4 * index[i]);
  return (Wide)out;
#endif
}

// The elements of a vector at indices.
inline Floats permuted(Floats values, Ints index) {
#if defined(HKI_AVX512)
  return (Floats)_mm512_permutexvar_ps((__m512i)index, (__m512)values);
#elif defined(HKI_AVX2)
  return (Floats)_mm256_permutevar8x32_ps((__m256)values, (__m256i)index);
#else
  Floats out;
  for (int i = 0; i < kLanes; ++i) out[i] = values[index[i]];
  return out;
#endif
}

// --- the matrix ----------------------------------------------------------------------------------

// How values are made of codes: eight bits without a sign, two to four that are counted, four by a table of small
// values, or by any.
enum Values { kBytes, kTwoBits, kThreeBits, kCounted, kSmallTable, kAnyTable };

// Vectors of values for one of codes (of the first plane).
constexpr int parts_of(Values how) { return how == kBytes ? 1 : how == kTwoBits || how == kThreeBits ? 4 : 2; }

// Its codes in vectors. Groups begin new ones, or vectors hold several whole groups.
struct Integers {
  Weights w;
  Wide table;    // the values of codes of few bits; what is added to codes of eight
  int32_t bias;     // what values have too much
  int64_t largest;  // of the values, with it
  float unit;       // of the values

  // (Known once: dividing takes longer than multiplying a row of the matrix.)
  int64_t parts;        // (as of `parts_of`)
  int64_t group_bytes;  // in the first plane
  bool several;
  int64_t pieces, vectors;     // parts of a row that begin new vectors, and the vectors of each
  int64_t starts, in_start;  // sums that begin for themselves, and the groups of each
  int64_t in_group = 1;      // starts of a group, if it has several
  Ints low_at, high_at, high_shift;  // for `kThreeBits`: which words have the planes, and the next bit of these

  explicit Integers(const Weights& w)
      : w(w), parts(8 / w.planes[0]), group_bytes(w.group * w.planes[0] / 8) {
    several = group_bytes < kWide && group_bytes % 4 == 0 && kWide % group_bytes == 0;
    pieces = several ? 1 : w.groups;
    vectors = ((several ? w.groups * group_bytes : group_bytes) + kWide - 1) / kWide;
    starts = several ? vectors : pieces;
    in_start = several ? kWide / group_bytes : 1;
  }

  // Bytes from the codes of one start to those of the next.
  int64_t start_bytes() const { return in_group > 1 ? kWide : in_start * (w.stored / w.groups); }

  // Finds both planes of three bits. False if groups don't share vectors of words, or have one each.
  bool set_planes() {
    if (group_bytes % 8 != 0 || !starts_are_vectors() || (in_start == 1 && group_bytes != kWide)) return false;
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t words = group_bytes / 4, word = i % words, first = i / words * (words + words / 2);
      low_at[i] = first + word, high_at[i] = first + words + word % (words / 2);
      high_shift[i] = word / (words / 2);
    }
    return true;
  }

  // Takes the values of codes of few bits from a table, if these are small integers, or halves of them.
  bool set(const float* of_codes) {
    const int count = 1 << w.bits();
    const auto [least, most] = std::minmax_element(of_codes, of_codes + count);
    for (unit = 1; unit >= 0.5f; unit /= 2) {
      if (!(*least >= -15 * unit && *least <= 0 && *most - *least <= kLargestOfDigits * unit)) continue;
      bool whole = true;
      for (int i = 0; i < kWide; ++i) {
        const float value = of_codes[i & count - 1];
        table[i] = (value - *least) / unit;
        whole &= value == *least + table[i] * unit;
      }
      bias = -*least / unit, largest = (*most - *least) / unit;
      if (whole && bias * unit == -*least) return true;
    }
    return false;
  }

  bool starts_are_vectors() const { return several || starts == pieces * vectors; }

  // Begins a sum for each vector. False if vectors have codes of two groups.
  bool start_at_vectors() {
    if (starts_are_vectors()) return true;
    if (w.groups > 1 && group_bytes % kWide != 0) return false;
    starts = pieces * vectors, in_group = vectors;
    return true;
  }

  Values values() const {
    if (w.bits() == 8) return kBytes;
    bool counted = true;
    for (int i = 0; i < 1 << w.bits(); ++i) counted &= table[i] == i;
    if (w.bits() < 4) return !counted ? kAnyTable : w.bits() == 2 ? kTwoBits : kThreeBits;
    return counted ? kCounted : largest <= kSmall ? kSmallTable : kAnyTable;
  }

  // Which group of its start each lane belongs to.
  Ints of_lanes() const {
    Ints out;
    for (int i = 0; i < kLanes; ++i) out[i] = i * (int)in_start / kLanes;
    return out;
  }

  // The codes at `p`, as values.
  template <Values how>
  void read(const uint8_t* p, Wide* out) const {
    const Wide codes = how == kThreeBits ? Wide{} : load<Wide>(p);
    if constexpr (how == kBytes) {
      out[0] = codes + table;
    } else if constexpr (how == kTwoBits) {
      HKI_UNROLL
      for (int p = 0; p < 4; ++p) out[p] = (Wide)((UnsignedWords)codes >> 2 * p) & 3;
    } else if constexpr (how == kThreeBits) {
      const UnsignedWords low = (UnsignedWords)picked(p, low_at);
      const UnsignedWords high = (UnsignedWords)((Ints)picked(p, high_at) >> high_shift);
      out[0] = ((Wide)low & 3) | ((Wide)(high << 2) & 4);
      HKI_UNROLL
      for (int p = 1; p < 4; ++p) out[p] = ((Wide)(low >> 2 * p) & 3) | ((Wide)(high >> 2 * (p - 1)) & 4);
    } else if constexpr (how == kCounted) {
      out[0] = codes & 15, out[1] = (Wide)((UnsignedWords)codes >> 4) & 15;
    } else {
      out[0] = lookup(table, codes & 15);
      out[1] = lookup(table, (Wide)((UnsignedWords)codes >> 4) & 15);
    }
  }
};

// --- rounding ------------------------------------------------------------------------------------

// The nearest codes for each element, and their scale; zeros if it is NaN.
HKI_INLINE float round_row(const float* x, int64_t length, int8_t* codes) {
  const float scale = scale_of_row(x, length), inverse = 1 / scale;
  if (scale != scale) {
    std::fill_n(codes, length, 0);
    return scale;
  }
  for (int64_t k = 0; k < length; ++k) codes[k] = nearest_code(x[k] * inverse);
  return scale;
}

// The nearest integers, as three digits with a sign, and their scale: a power of two, so that numbers of few
// digits stay as they are, and as small as three digits allow.
HKI_INLINE float round_to_digits(const float* x, int64_t length, int8_t* codes, int64_t apart) {
  int32_t largest = 0;
  for (int64_t k = 0; k < length; ++k) {
    int32_t bits;
    std::memcpy(&bits, x + k, 4);
    largest = std::max(largest, bits & 0x7fffffff);
  }
  // (Three digits have numbers up to 127 * 65793, which is more than 2^23 / 1.0042.)
  const int32_t exponent = std::max(Numbers::bits_of(Numbers::as_float(largest) * 1.0042f) >> 23, 24);
  const float scale = Numbers::as_float(exponent - 22 << 23), inverse = Numbers::as_float(276 - exponent << 23);
  for (int64_t k = 0; k < length; ++k) {
    const int32_t value = static_cast<int32_t>(std::rint(x[k] * inverse));
    const int32_t high = value + 128 >> 8;
    codes[k] = value + 0x8080 >> 16, codes[apart + k] = high, codes[2 * apart + k] = value;
  }
  return scale;
}

template <int D>
HKI_INLINE float round_part(const float* x, int64_t length, int8_t* codes, int64_t apart) {
  return D == 1 ? round_row(x, length, codes) : round_to_digits(x, length, codes, apart);
}

// The codes of a row, `[D, groups, group]`, with zeros behind the last one, and the scale of each group.
template <int D>
void round_parts(const Integers& w, const float* x, bool in_groups, float* scales, int8_t* codes) {
  const int64_t length = w.w.length, groups = w.w.groups, group = w.w.group, apart = groups * group;
  if (in_groups)
    for (int64_t i = 0; i < groups; ++i) {
      const int64_t at = i * group, size = std::min(group, length - at);
      constexpr int64_t kUsual = 32;  // such groups have their own code, without loops
      scales[i] = size == kUsual ? round_part<D>(x + at, kUsual, codes + at, apart)
                                 : round_part<D>(x + at, size, codes + at, apart);
    }
  else
    std::fill_n(scales, groups, round_part<D>(x, length, codes, apart));
  for (int d = 0; d < D; ++d) std::fill(codes + d * apart + length, codes + (d + 1) * apart, 0);
}

}  // namespace

#endif  // HAIKU_IMPLICIT_KERNELS_INTEGERS_H_
