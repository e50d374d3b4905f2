// Blocks of numbers times a Hadamard matrix, over the root of their length.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "call.h"
#include "threads.h"

namespace {

constexpr int kLanes = 8;             // longer vectors would not be faster: memory is the limit
constexpr int64_t kOfTask = 1 << 12;  // numbers

typedef float Floats __attribute__((vector_size(kLanes * 4)));

inline Floats load(const float* p) {
  Floats value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

inline void store(float* p, Floats value) { std::memcpy(p, &value, sizeof(value)); }

// Multiplies numbers that are `stride` apart, in place: by sums and differences of vectors.
template <int count>
void multiply(float* x, int64_t length, int64_t stride) {
  for (int64_t i = 0; i < length; i += count * stride)
    for (float* first = x + i; first < x + i + stride; first += kLanes) {
      Floats v[count];
      for (int k = 0; k < count; ++k) v[k] = load(first + k * stride);
      for (int half = 1; half < count; half *= 2)
        for (int k = 0; k < count; ++k)
          if (const Floats a = v[k], b = v[k | half]; !(k & half)) v[k] = a + b, v[k | half] = a - b;
      for (int k = 0; k < count; ++k) store(first + k * stride, v[k]);
    }
}

// Multiplies a block: each `kLanes` numbers by the matrix of that size, with the scale of the whole matrix,
// and then the results by sums and differences.
void multiply_block(const float* x, float* y, int64_t length, const Floats* matrix) {
  for (int64_t i = 0; i < length; i += kLanes) {
    Floats sum = {};
    for (int k = 0; k < kLanes; ++k) sum += x[i + k] * matrix[k];
    store(y + i, sum);
  }
  int64_t stride = kLanes;
  for (; 8 * stride <= length; stride *= 8) multiply<8>(y, length, stride);
  if (4 * stride == length) multiply<4>(y, length, stride);
  if (2 * stride == length) multiply<2>(y, length, stride);
}

// Operand and result: [..., length], of which each `block` numbers are multiplied; `block` is a power of
// two, and at least 8.
void hadamard(const Call& call) {
  const Array x = call.operand(0), y = call.result(0);
  const int64_t block = call.number<int64_t>("block"), count = x.size() / block;
  const float scale = 1 / std::sqrt(static_cast<float>(block));
  Floats matrix[kLanes];
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) matrix[i][j] = __builtin_parity(i & j) ? -scale : scale;
  const haiku_implicit::Threads::Busy busy;
  const Team team = worthwhile(call.threads(), kLanes * x.size());  // products
  team.parts(count, 1, std::max<int64_t>(1, kOfTask / block), [&](int64_t first, int64_t last) {
    for (int64_t i = first * block; i < last * block; i += block)
      multiply_block(x.floats() + i, y.floats() + i, block, matrix);
  });
}

}  // namespace

HKI_DEFINE_HANDLER(Hadamard, hadamard)
