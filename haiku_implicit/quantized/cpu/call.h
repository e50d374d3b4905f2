// XLA's calls of foreign functions, by its C interface: that for C++ takes seconds to compile.

#ifndef HAIKU_IMPLICIT_KERNELS_CALL_H_
#define HAIKU_IMPLICIT_KERNELS_CALL_H_

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>

#include "xla/ffi/api/c_api.h"

namespace {

// Elements that others hold.
template <typename T>
struct List {
  const T* data;
  int64_t size;

  const T& operator[](int64_t i) const { return data[i]; }
  const T& back() const { return data[size - 1]; }
};

// An operand or a result.
struct Array {
  XLA_FFI_DataType dtype;
  void* data;
  List<int64_t> shape;

  float* floats() const { return static_cast<float*>(data); }
  int64_t size() const {
    int64_t product = 1;
    for (int64_t i = 0; i < shape.size; ++i) product *= shape[i];
    return product;
  }
};

// One call. What it is asked for has to be there, in this dtype.
class Call {
 public:
  explicit Call(const XLA_FFI_CallFrame* frame) : frame_(frame) {}

  Array operand(int64_t i) const { return array(frame_->args.args[i]); }
  Array result(int64_t i) const { return array(frame_->rets.rets[i]); }

  // A number among the attributes.
  template <typename T>
  T number(const char* name) const {
    const void* found = attribute(name, XLA_FFI_AttrType_SCALAR);
    return *static_cast<const T*>(static_cast<const XLA_FFI_Scalar*>(found)->value);
  }

  // An array among the attributes.
  template <typename T>
  List<T> list(const char* name) const {
    const auto* found =
        static_cast<const XLA_FFI_Array*>(attribute(name, XLA_FFI_AttrType_ARRAY));
    return {static_cast<const T*>(found->data), static_cast<int64_t>(found->size)};
  }

  // How many threads XLA's pool has.
  int64_t threads() const {
    int64_t threads = 1;
    XLA_FFI_ThreadPool_NumThreads_Args args = {};
    args.struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE;
    args.ctx = frame_->ctx;
    args.num_threads = &threads;
    frame_->api->XLA_FFI_ThreadPool_NumThreads(&args);
    return threads;
  }

 private:
  static Array array(const void* of) {
    const auto* buffer = static_cast<const XLA_FFI_Buffer*>(of);
    return {buffer->dtype, buffer->data, {buffer->dims, buffer->rank}};
  }

  const void* attribute(const std::string& name, XLA_FFI_AttrType type) const {
    const XLA_FFI_Attrs& all = frame_->attrs;
    for (int64_t i = 0; i < all.size; ++i)
      if (name.compare(0, name.npos, all.names[i]->ptr, all.names[i]->len) == 0 &&
          all.types[i] == type)
        return all.attrs[i];
    throw std::invalid_argument("no attribute " + name);
  }

  const XLA_FFI_CallFrame* frame_;
};

// Answers XLA, which first asks for the version of its interface, and later calls.
template <void (*function)(const Call&)>
XLA_FFI_Error* answer(XLA_FFI_CallFrame* frame) {
  const auto* extension = frame->extension_start;
  if (extension && extension->type == XLA_FFI_Extension_Metadata) {
    auto* metadata = reinterpret_cast<const XLA_FFI_Metadata_Extension*>(extension)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    metadata->traits = 0;
    return nullptr;
  }
  try {
    function(Call(frame));
    return nullptr;
  } catch (const std::exception& error) {
    XLA_FFI_Error_Create_Args args = {};
    args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
    args.message = error.what();
    args.errc = XLA_FFI_Error_Code_INTERNAL;
    return frame->api->XLA_FFI_Error_Create(&args);
  }
}

}  // namespace

// Defines a symbol that XLA calls.
#define HKI_DEFINE_HANDLER(symbol, function) \
  extern "C" XLA_FFI_Error* symbol(XLA_FFI_CallFrame* frame) { return answer<function>(frame); }

#endif  // HAIKU_IMPLICIT_KERNELS_CALL_H_
