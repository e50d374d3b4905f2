// The numbers of trellis codes (`types/trellis.py`).

#ifndef HAIKU_IMPLICIT_KERNELS_TRELLIS_H_
#define HAIKU_IMPLICIT_KERNELS_TRELLIS_H_

#include <cstdint>

namespace {

constexpr int kWindow = 12;  // bits that a number depends on
constexpr int kStates = 1 << kWindow;
constexpr int kSteps = 16;  // numbers in each lane, which is as many words as a number has bits

// How the windows of codes become integers; numbers are 64ths of these, less the bias.
struct Code {
  uint16_t factor;
  bool mixed;  // with the bytes of the window itself
  int bias;
};

constexpr Code code_of(int bits) {
  return bits == 2 ? Code{45713, false, 255} : Code{bits == 3 ? uint16_t{24263} : uint16_t{32477}, true, 195};
}

// The integer of a window, before its bias is subtracted.
template <int bits>
inline int integer_of(int window) {
  constexpr Code code = code_of(bits);
  const int hash = (uint16_t)(window * code.factor), low = hash & 255, high = hash >> 8;
  return code.mixed ? (low + (window & 255) + 1) / 2 + (high + (window >> 8) + 1) / 2 : low + high;
}

template <int bits>
inline float value_of(int window) {
  return (integer_of<bits>(window) - code_of(bits).bias) / 64.0f;
}

}  // namespace

#endif  // HAIKU_IMPLICIT_KERNELS_TRELLIS_H_
