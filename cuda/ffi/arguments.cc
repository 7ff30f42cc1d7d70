#include "arguments.h"

#include <algorithm>
#include <sstream>

#include "failure.h"

namespace fp4attn {
namespace {

const char* Name(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::U8:
      return "uint8";
    case ffi::DataType::S32:
      return "int32";
    case ffi::DataType::F16:
      return "float16";
    case ffi::DataType::F32:
      return "float32";
    case ffi::DataType::BF16:
      return "bfloat16";
    default:
      return "another type";
  }
}

}  // namespace

std::string Text(ffi::DataType dtype, const Shape& shape) {
  std::ostringstream text;
  text << Name(dtype) << " [";
  for (size_t i = 0; i < shape.size(); ++i) {
    text << (i ? ", " : "");
    if (shape[i] < 0) {
      text << "any";
    } else {
      text << shape[i];
    }
  }
  text << "]";
  return text.str();
}

void Arguments::Check(std::string_view kind, std::string_view name, ffi::AnyBuffer buffer, ffi::DataType dtype,
                      const Shape& shape) const {
  const Shape got(buffer.dimensions().begin(), buffer.dimensions().end());
  bool same = buffer.element_type() == dtype && got.size() == shape.size();
  for (size_t i = 0; same && i < shape.size(); ++i) same = shape[i] < 0 || shape[i] == got[i];
  if (same) return;
  Fail(ffi::ErrorCode::kInvalidArgument, step_, ": ", kind, " ", name, ": expected ", Text(dtype, shape), ", got ",
       Text(buffer.element_type(), got));
}

ffi::AnyBuffer Arguments::Operand(std::string_view name, ffi::DataType dtype, const Shape& shape) {
  auto buffer = operands_.get<ffi::AnyBuffer>(next_operand_++);
  if (!buffer) {
    Fail(ffi::ErrorCode::kInvalidArgument, step_, ": expected an operand ", name, ", got ", operands_.size(),
         " operands");
  }
  Check("operand", name, *buffer, dtype, shape);
  return *buffer;
}

void* Arguments::OptionalOperand(bool present, std::string_view name, ffi::DataType dtype, const Shape& shape) {
  return present ? Operand(name, dtype, shape).untyped_data() : nullptr;
}

void* Arguments::Result(std::string_view name, ffi::DataType dtype, const Shape& shape) {
  auto buffer = results_.get<ffi::AnyBuffer>(next_result_++);
  if (!buffer) {
    Fail(ffi::ErrorCode::kInvalidArgument, step_, ": expected a result ", name, ", got ", results_.size(), " results");
  }
  Check("result", name, **buffer, dtype, shape);
  return (*buffer)->untyped_data();
}

void Arguments::Finish() const {
  if (next_operand_ == operands_.size() && next_result_ == results_.size()) return;
  Fail(ffi::ErrorCode::kInvalidArgument, step_, ": expected ", next_operand_, " operands and ", next_result_,
       " results, got ", operands_.size(), " and ", results_.size());
}

template <typename T>
T Attributes::Get(std::string_view name, std::string_view kind) const {
  auto value = dictionary_.get<T>(name);
  if (!value) {
    Fail(ffi::ErrorCode::kInvalidArgument, step_, ": expected an attribute ", name, " of type ", kind, ", got ",
         dictionary_.contains(name) ? "another type" : "none");
  }
  return *value;
}

bool Attributes::Flag(std::string_view name) const { return Get<bool>(name, "bool"); }
int32_t Attributes::Integer(std::string_view name) const { return Get<int32_t>(name, "int32"); }
float Attributes::Number(std::string_view name) const { return Get<float>(name, "float32"); }
std::string_view Attributes::Choice(std::string_view name) const { return Get<std::string_view>(name, "string"); }
bool Attributes::IsChoice(std::string_view name) const { return dictionary_.get<std::string_view>(name).has_value(); }

void Attributes::Require(std::string_view name, std::initializer_list<std::string_view> choices) const {
  const std::string_view got = Choice(name);
  if (std::find(choices.begin(), choices.end(), got) != choices.end()) return;
  std::ostringstream expected;
  for (std::string_view choice : choices) expected << (choice == *choices.begin() ? "" : " or ") << choice;
  Fail(ffi::ErrorCode::kUnimplemented, step_, ": ", name, ": expected ", expected.str(), ", got ", got);
}

}  // namespace fp4attn
