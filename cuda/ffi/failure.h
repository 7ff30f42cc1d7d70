// Failures inside a handler are exceptions; `Guarded` turns them into the error that XLA raises in Python.
#pragma once

#include <exception>
#include <sstream>
#include <string>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace fp4attn {

namespace ffi = xla::ffi;

class Failure : public std::exception {
 public:
  Failure(ffi::ErrorCode code, std::string message) : code_(code), message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }
  ffi::Error ToError() const { return ffi::Error(code_, message_); }

 private:
  ffi::ErrorCode code_;
  std::string message_;
};

template <typename... Parts>
[[noreturn]] void Fail(ffi::ErrorCode code, const Parts&... parts) {
  std::ostringstream text;
  text << "jax_fp4attn: ";
  (text << ... << parts);
  throw Failure(code, text.str());
}

template <typename Function>
ffi::Error Guarded(Function&& function) {
  try {
    function();
    return ffi::Error::Success();
  } catch (const Failure& failure) {
    return failure.ToError();
  } catch (const std::exception& failure) {
    return ffi::Error::Internal(std::string("jax_fp4attn: ") + failure.what());
  }
}

}  // namespace fp4attn
