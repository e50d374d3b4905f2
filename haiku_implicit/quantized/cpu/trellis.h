// The numbers of trellis codes (`types/trellis.py`).

#ifndef HAIKU_IMPLICIT_KERNELS_TRELLIS_H_
#define HAIKU_IMPLICIT_KERNELS_TRELLIS_H_

#include <cstdint>

namespace {

constexpr int kWindow = 12;  // bits that a number depends on
constexpr int kStates = 1 << kWindow;
constexpr uint32_t kFactor = 34038481, kAdded = 76625530;

// The number of a state: 1MAD (QTIP, arXiv:2406.11235).
inline float value_of(uint32_t state) {
  const uint32_t hash = state * kFactor + kAdded;
  int sum = 0;
  for (int i = 0; i < 32; i += 8) sum += hash >> i & 255;
  return (sum / 2 - 254) / 64.0f;
}

}  // namespace

#endif  // HAIKU_IMPLICIT_KERNELS_TRELLIS_H_
