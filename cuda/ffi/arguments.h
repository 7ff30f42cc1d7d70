// Operands, results and attributes of a custom call, checked on access. Messages say expected and got.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace fp4attn {

namespace ffi = xla::ffi;

using Shape = std::vector<int64_t>;

std::string Text(ffi::DataType dtype, const Shape& shape);

// The buffers of a call, taken in order.
class Arguments {
 public:
  Arguments(std::string_view step, ffi::RemainingArgs operands, ffi::RemainingRets results)
      : step_(step), operands_(operands), results_(results) {}

  // The next operand, of any size in the dimensions that are negative.
  ffi::AnyBuffer Operand(std::string_view name, ffi::DataType dtype, const Shape& shape);
  // The device memory of the next operand, or null if there is none of this name.
  void* OptionalOperand(bool present, std::string_view name, ffi::DataType dtype, const Shape& shape);
  // The device memory of the next result.
  void* Result(std::string_view name, ffi::DataType dtype, const Shape& shape);
  // Checks that nothing is left.
  void Finish() const;

 private:
  void Check(std::string_view kind, std::string_view name, ffi::AnyBuffer buffer, ffi::DataType dtype,
             const Shape& shape) const;

  std::string step_;
  ffi::RemainingArgs operands_;
  ffi::RemainingRets results_;
  size_t next_operand_ = 0, next_result_ = 0;
};

class Attributes {
 public:
  Attributes(std::string_view step, ffi::Dictionary dictionary) : step_(step), dictionary_(dictionary) {}

  bool Flag(std::string_view name) const;
  int32_t Integer(std::string_view name) const;
  float Number(std::string_view name) const;
  std::string_view Choice(std::string_view name) const;
  bool IsChoice(std::string_view name) const;
  // Throws unless the choice is one that there are kernels for.
  void Require(std::string_view name, std::initializer_list<std::string_view> choices) const;

 private:
  template <typename T>
  T Get(std::string_view name, std::string_view kind) const;

  std::string step_;
  ffi::Dictionary dictionary_;
};

}  // namespace fp4attn
