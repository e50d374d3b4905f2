// Calls the kernels as XLA does, for all layouts of codes, with operands in memory of exactly their size.
//
// Products are compared with sums in float64 of codes that are read one by one. `test_sanitized.py`
// compiles this together with the kernels, so that a read past an operand ends the program.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* QuantizedMatmul(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* IntegerMatmul(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* TrellisMatmul(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* TrellisDecode(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* Hadamard(XLA_FFI_CallFrame*);

namespace {

constexpr int kThreads = 2;

// The operands, results and attributes of a call.
class Frame {
 public:
  void buffer(XLA_FFI_DataType dtype, void* data, std::vector<int64_t> shape, bool result) {
    auto one = std::make_unique<Buffer>();
    one->shape = shape;
    one->of = {sizeof(one->of), nullptr, dtype, data, (int64_t)shape.size(), one->shape.data()};
    (result ? results_ : operands_).push_back(&one->of);
    buffers_.push_back(std::move(one));
  }

  template <typename T>
  void number(std::string name, T value) {
    auto one = std::make_unique<Attribute>();
    one->name = name;
    one->values.resize(sizeof(T));
    std::memcpy(one->values.data(), &value, sizeof(T));
    one->scalar.value = one->values.data();
    add(std::move(one), XLA_FFI_AttrType_SCALAR);
  }

  template <typename T>
  void list(std::string name, const std::vector<T>& values) {
    auto one = std::make_unique<Attribute>();
    one->name = name;
    one->values.resize(values.size() * sizeof(T));
    std::memcpy(one->values.data(), values.data(), one->values.size());
    one->array.size = values.size(), one->array.data = one->values.data();
    add(std::move(one), XLA_FFI_AttrType_ARRAY);
  }

  void call(XLA_FFI_Error* (*function)(XLA_FFI_CallFrame*)) {
    XLA_FFI_Api api = {};
    api.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) -> XLA_FFI_Error* {
      *args->num_threads = kThreads;
      return nullptr;
    };
    api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) -> XLA_FFI_Error* {
      std::printf("error: %s\n", args->message);
      std::exit(1);
    };
    XLA_FFI_CallFrame frame = {};
    frame.api = &api;
    frame.args.size = operands_.size(), frame.args.args = operands_.data();
    frame.rets.size = results_.size(), frame.rets.rets = results_.data();
    frame.attrs = {0, nullptr, (int64_t)names_.size(), types_.data(), names_.data(), attrs_.data()};
    function(&frame);
  }

 private:
  struct Buffer {
    std::vector<int64_t> shape;
    XLA_FFI_Buffer of;
  };
  struct Attribute {
    std::string name;
    std::vector<char> values;
    XLA_FFI_Scalar scalar = {};
    XLA_FFI_Array array = {};
    XLA_FFI_ByteSpan span;
  };

  void add(std::unique_ptr<Attribute> one, XLA_FFI_AttrType type) {
    one->span = {one->name.data(), one->name.size()};
    names_.push_back(&one->span), types_.push_back(type);
    attrs_.push_back(type == XLA_FFI_AttrType_SCALAR ? (void*)&one->scalar : &one->array);
    attributes_.push_back(std::move(one));
  }

  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<std::unique_ptr<Attribute>> attributes_;
  std::vector<void*> operands_, results_, attrs_;
  std::vector<XLA_FFI_ByteSpan*> names_;
  std::vector<XLA_FFI_AttrType> types_;
};

struct Format {
  const char* name;
  int planes[2], kind, bias;
  std::vector<float> table;

  int bits() const { return planes[0] + planes[1]; }
  bool floats() const { return kind > 2; }
};

std::vector<float> counted(int from, int count = 16) {
  std::vector<float> out(16);
  for (int i = 0; i < 16; ++i) out[i] = from + i % count;
  return out;
}

// The values of 8-bit floats. Codes of infinities and NaNs are not used.
std::vector<float> eight_bit_floats(int exponent, int digits) {
  std::vector<float> out(256);
  for (int i = 0; i < 256; ++i) {
    const int power = i >> digits & ((1 << exponent) - 1), bias = (1 << exponent - 1) - 1;
    const int tail = (i & ((1 << digits) - 1)) + (power ? 1 << digits : 0);
    out[i] = std::ldexp(i & 128 ? -tail : tail, std::max(power, 1) - bias - digits);
  }
  return out;
}

// A matrix [rows, length] with its codes [rows, stored] and scales and offsets [rows, groups].
struct Matrix {
  const Format& format;
  int64_t rows, length, group, groups, stored;
  bool with_offset;
  std::vector<uint8_t> codes;
  std::vector<float> scale, offset;

  Matrix(const Format& format, int64_t rows, int64_t length, int64_t group, bool with_offset,
         bool largest, std::mt19937& random)
      : format(format), rows(rows), length(length), group(group), groups((length + group - 1) / group),
        stored(groups * group * format.bits() / 8), with_offset(with_offset), codes(rows * stored),
        scale(rows * groups), offset(with_offset ? rows * groups : 0) {
    for (uint8_t& x : codes) x = largest ? (format.name[0] == 'f' ? 0x77 : 255) : random();  // the largest value
    if (format.floats())
      for (uint8_t& x : codes) x &= 0xbb;
    for (float& x : scale) x = 0.5f + random() % 64 / 64.0f;
    for (float& x : offset) x = random() % 64 / 32.0f - 1;
  }

  int code(int64_t row, int64_t k) const {
    const uint8_t* at = codes.data() + row * stored + k / group * (stored / groups);
    int found = 0, below = 0;
    for (int bits : format.planes) {
      if (!bits) break;
      const int64_t size = group * bits / 8, e = k % group;
      found |= (at[e % size] >> e / size * bits & ((1 << bits) - 1)) << below;
      at += size, below += bits;
    }
    return found;
  }
  float value(int64_t row, int64_t k) const {
    const int found = code(row, k);
    if (format.kind == 1) return (int8_t)(found - format.bias);
    return format.kind == 2 ? found : format.table[found];
  }
  double dense(int64_t row, int64_t k) const {
    const int64_t at = row * groups + k / group;
    return (double)value(row, k) * scale[at] + (with_offset ? offset[at] : 0);
  }
};

int wrong = 0, compared = 0;

void compare(const Matrix& w, const char* of, int64_t m, const std::vector<float>& got,
             const std::vector<double>& want) {
  double size = 1;
  for (double x : want) size = std::max(size, std::abs(x));
  for (size_t i = 0; i < got.size(); ++i)
    if (++compared; !(std::abs(got[i] - want[i]) <= 1e-5 * size) && ++wrong < 10)
      std::printf("%s of %s [%ld, %ld] in groups of %ld, %ld rows: %g and not %g at %zu\n", of,
                  w.format.name, w.rows, w.length, w.group, m, got[i], want[i], i);
}

void operands(Frame& call, Matrix& w, std::vector<float>& x, int64_t m) {
  call.buffer(XLA_FFI_DataType_F32, x.data(), {1, m, (int64_t)x.size() / m}, false);
  call.buffer(XLA_FFI_DataType_U8, w.codes.data(), {w.rows, w.stored}, false);
  call.buffer(XLA_FFI_DataType_F32, w.scale.data(), {w.rows, w.groups}, false);
  if (w.with_offset) call.buffer(XLA_FFI_DataType_F32, w.offset.data(), {w.rows, w.groups}, false);
  else call.buffer(XLA_FFI_DataType_F32, w.offset.data(), {0}, false);
  call.list<int64_t>("order", {0});
  call.list<int64_t>("planes", {w.format.planes[0], w.format.planes[1]});
}

void check_floats(Matrix& w, int64_t m, bool along_rows, int64_t rounding, std::mt19937& random) {
  const int64_t in = along_rows ? w.rows : w.length, out = along_rows ? w.length : w.rows;
  std::vector<float> x(m * in), y(m * out), packed(along_rows || m <= 2 ? 0 : (m + 31) / 32 * 32 * in);
  for (float& one : x) one = random() % 256 / 64.0f - 2;
  Frame call;
  operands(call, w, x, m);
  call.buffer(XLA_FFI_DataType_F32, y.data(), {1, m, out}, true);
  call.buffer(XLA_FFI_DataType_F32, packed.data(), {(int64_t)packed.size()}, true);
  call.number("along_rows", along_rows);
  call.number<int64_t>("kind", w.format.kind);
  call.number<int64_t>("bias", w.format.bias);
  call.number<int64_t>("rounding", rounding);
  call.list("table", w.format.table);
  call.call(QuantizedMatmul);
  std::vector<double> want(m * out);
  for (int64_t i = 0; i < w.rows; ++i)
    for (int64_t k = 0; k < w.length; ++k) {
      double value = w.dense(i, k);
      if (rounding) {  // to bfloat16; these scales and offsets have few digits
        float narrow = value;
        uint32_t bits;
        std::memcpy(&bits, &narrow, 4);
        bits = bits + 0x7fff + (bits >> 16 & 1) & 0xffff0000;
        std::memcpy(&narrow, &bits, 4);
        value = narrow;
      }
      for (int64_t r = 0; r < m; ++r)
        want[r * out + (along_rows ? k : i)] += value * x[r * in + (along_rows ? i : k)];
    }
  compare(w, along_rows ? "product along rows" : "product", m, y, want);
}

// The scale of some activations, which become integers.
double rounded(float* x, int64_t count) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(x[i]));
  const float scale = std::max(largest * (float)(1 / 127.5), 0x1p-63f), inverse = 1 / scale;
  for (int64_t i = 0; i < count; ++i) x[i] = std::min(std::rint(x[i] * inverse), 127.0f);
  return scale;
}

void check_integers(Matrix& w, int64_t m, bool in_groups, bool largest, std::mt19937& random) {
  std::vector<float> x(m * w.length), y(m * w.rows);
  for (float& one : x) one = random() % 256 / 64.0f - 2;
  for (float& one : x)
    if (largest) one = -2;
  int bias = w.format.kind == 1 ? 128 : 0;
  std::vector<int64_t> table = {bias};
  if (w.format.bits() == 4) {
    float least = 0;
    for (float one : w.format.table) least = std::min(least, one);
    bias = -least, table.clear();
    for (int i = 0; i < 16; ++i) table.push_back(w.format.table[i] + bias);
  }
  Frame call;
  operands(call, w, x, m);
  call.buffer(XLA_FFI_DataType_F32, y.data(), {1, m, w.rows}, true);
  call.list("table", table);
  call.number<int64_t>("bias", bias);
  call.number<float>("unit", 1);
  call.number("in_groups", in_groups);
  call.call(IntegerMatmul);
  std::vector<double> want(m * w.rows), scales(w.groups);
  for (int64_t r = 0; r < m; ++r) {
    float* row = x.data() + r * w.length;
    const double of_row = in_groups ? 0 : rounded(row, w.length);
    for (int64_t g = 0; g < w.groups; ++g)
      scales[g] = in_groups ? rounded(row + g * w.group, std::min(w.group, w.length - g * w.group)) : of_row;
    for (int64_t i = 0; i < w.rows; ++i)
      for (int64_t k = 0; k < w.length; ++k)
        want[r * w.rows + i] += w.dense(i, k) * row[k] * scales[k / w.group];
  }
  compare(w, "product of integers", m, y, want);
}

// Trellis codes of some sequences in each row, each number read from 12 bits of a circle.
void check_trellis(int64_t bits, int64_t rows, int64_t count, int64_t steps, int64_t m, std::mt19937& random) {
  const int64_t length = count * steps - random() % 32, circle = steps / 16, lanes = count * circle;
  std::vector<uint16_t> words(rows * bits * lanes);
  for (uint16_t& x : words) x = random();
  std::vector<float> numbers(rows * count * steps);
  std::vector<double> dense;
  for (int64_t i = 0; i < (int64_t)numbers.size(); ++i) {
    const int64_t row = i / (count * steps), step = i / lanes % 16, lane = i % lanes;
    int window = 0;
    for (int64_t j = 0; j < 12; ++j) {
      const int64_t bit = step * bits + j, behind = bit / (16 * bits);
      const int64_t at = lane / circle * circle + (lane + behind) % circle, of_lane = bit % (16 * bits);
      const uint16_t word = words[(row * bits + of_lane / 16) * lanes + at];
      window |= (word >> of_lane % 16 & 1) << j;
    }
    const int hash = window * (bits == 2 ? 45713 : bits == 3 ? 24263 : 32477) & 0xffff;
    const int low = hash & 255, high = hash >> 8;
    if (bits > 2) dense.push_back(((low + (window & 255) + 1) / 2 + (high + (window >> 8) + 1) / 2 - 195) / 64.0);
    else dense.push_back((low + high - 255) / 64.0);
  }
  const Format format = {"trellis codes", {(int)bits, 0}, 0, 0, {}};
  const Matrix named(format, rows, length, steps, false, false, random);
  bool along_rows = false, in_bytes = false;
  const auto call = [&](auto* kernel, std::vector<float>* x, std::vector<float>& y, int64_t out) {
    Frame frame;
    if (x) frame.buffer(XLA_FFI_DataType_F32, x->data(), {1, m, (int64_t)x->size() / m}, false);
    frame.buffer(XLA_FFI_DataType_U16, words.data(), {1, rows, bits * lanes}, false);
    frame.buffer(XLA_FFI_DataType_F32, y.data(), {1, (int64_t)y.size() / out, out}, true);
    frame.number<int64_t>("bits", bits);
    frame.number<int64_t>("steps", steps);
    frame.number<int64_t>("length", length);
    frame.number<int64_t>("along_rows", along_rows);
    frame.number<int64_t>("rounded", in_bytes);
    frame.call(kernel);
  };
  call(TrellisDecode, nullptr, numbers, count * steps);
  compare(named, "numbers", m, numbers, dense);
  for (int how = 0; how < 4; ++how) {
    along_rows = how % 2, in_bytes = how / 2;
    const int64_t in = along_rows ? rows : length, out = along_rows ? length : rows;
    std::vector<float> x(m * in), y(m * out);
    for (float& one : x) one = random() % 256 / 64.0f - 2;
    call(TrellisMatmul, &x, y, out);
    std::vector<double> want(m * out), scales(m, 1);
    for (int64_t r = 0; r < m && in_bytes; ++r) scales[r] = rounded(x.data() + r * in, in);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t k = 0; k < length; ++k)
        for (int64_t r = 0; r < m; ++r)
          want[r * out + (along_rows ? k : i)] +=
              dense[i * count * steps + k] * x[r * in + (along_rows ? i : k)] * scales[r];
    compare(named, along_rows ? "product along rows" : "product", m, y, want);
  }
}

void check_rotation(int64_t m, int64_t block, std::mt19937& random) {
  const int64_t length = 3 * block;
  std::vector<float> x(m * length), y(m * length);
  std::vector<double> want(m * length);
  for (float& one : x) one = random() % 256 / 64.0f - 2;
  for (int64_t i = 0; i < m * length; ++i)
    for (int64_t k = 0; k < block; ++k)
      want[i] += x[i / block * block + k] * (__builtin_parity(i % block & k) ? -1 : 1) / std::sqrt(block);
  Frame frame;
  frame.buffer(XLA_FFI_DataType_F32, x.data(), {m, length}, false);
  frame.buffer(XLA_FFI_DataType_F32, y.data(), {m, length}, true);
  frame.number<int64_t>("block", block);
  frame.call(Hadamard);
  const Format format = {"a rotation", {0, 0}, 0, 0, {}};
  compare(Matrix(format, m, length, block, false, false, random), "product", m, y, want);
}

}  // namespace

int main(int count, char** args) {
  const std::vector<float> fine = [] {
    std::vector<float> out(16);
    for (int i = 0; i < 16; ++i) out[i] = std::sin(i + 1);
    return out;
  }();
  const std::vector<Format> formats = {
      {"1 bit", {1, 0}, 0, 0, counted(0, 2)},   {"2 bits", {2, 0}, 0, 0, counted(-2, 4)},
      {"3 bits", {2, 1}, 0, 0, counted(-4, 8)}, {"4 bits", {4, 0}, 0, 0, counted(-8)},
      {"a table", {4, 0}, 0, 0, fine},          {"fp4", {4, 0}, 0, 0, {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}},
      {"wide", {4, 0}, 0, 0, {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}},
      {"5 bits", {4, 1}, 1, 16, counted(0)},    {"6 bits", {4, 2}, 1, 32, counted(0)},
      {"int8", {8, 0}, 1, 0, counted(0)},       {"uint8", {8, 0}, 2, 0, counted(0)},
      {"e4m3", {8, 0}, 3, 0, eight_bit_floats(4, 3)}, {"e5m2", {8, 0}, 4, 0, eight_bit_floats(5, 2)},
  };
  std::mt19937 random(0);
  const int64_t some_rows[] = {1, 2, 3, 5, 8, 9, 17, 33, 70};
  int i = 0;
  for (const Format& format : formats)
    for (int64_t group : {8, 16, 24, 32, 40, 48, 64, 96, 128, 160, 256, 1312, 37, 100}) {
      if (group * format.planes[0] % 8 || group * format.planes[1] % 8) continue;
      for (int64_t length : {group, 3 * group, 2 * group - 5}) {
        const int64_t rows = 1 + random() % 70, m = some_rows[++i % 9];
        const bool largest = i % 4 == 0, with_offset = i % 3 == 0;
        Matrix w(format, rows, length, group, with_offset, largest, random);
        for (bool along_rows : {false, true}) check_floats(w, m, along_rows, i % 5 == 0, random);
        for (int64_t few : {1, 2}) check_floats(w, few, false, 0, random);
        if (format.bits() != 8 && format.bits() != 4 || format.floats()) continue;
        if (format.table == fine) continue;
        for (int64_t m : {some_rows[i % 6], some_rows[6 + i % 3]})
          check_integers(w, m, i % 2, largest, random);
      }
    }
  for (int64_t group : {32, 64, 128})  // of so many numbers that few rows are multiplied like many
    for (int64_t m : {3, 5, 8}) {
      Matrix w(formats[m % 2 ? 3 : 4], 300, 512, group, group == 64, false, random);
      check_floats(w, m, false, 0, random);
    }
  for (int64_t block : {8, 16, 32, 64, 128, 1024})
    for (int64_t m : {1, 70}) check_rotation(m, block, random);
  for (int64_t bits : {2, 3, 4})
    for (int64_t steps : {32, 96, 256})
      for (int64_t m : {1, 3, 8, 11}) check_trellis(bits, 1 + random() % 70, 1 + random() % 3, steps, m, random);
  std::printf("%d compared, %d wrong\n", compared, wrong);
  return wrong != 0;
}
