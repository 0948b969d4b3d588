// A call of an XLA handler with a frame made by hand, in place of XLA.
#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "xla/ffi/api/c_api.h"

namespace {

void* const stream = reinterpret_cast<void*>(7);
char* said;
size_t room;

XLA_FFI_Error* create_error(XLA_FFI_Error_Create_Args* args) {
  snprintf(said, room, "%s", args->message);
  return reinterpret_cast<XLA_FFI_Error*>(said);
}

XLA_FFI_Error* get_stream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = stream;
  return nullptr;
}

XLA_FFI_Error* get_device(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  args->device_ordinal = 3;
  return nullptr;
}

}  // namespace

// Calls a handler on buffers, of which the first `inputs` are arguments, and the others results.
// Returns whether the handler reported an error, whose message is written.
extern "C" bool call_handler(XLA_FFI_Handler* handler, int64_t plan, void** buffers, int inputs,
                             int count, char* message, size_t size) {
  said = message, room = size;
  XLA_FFI_Api api = {};
  api.XLA_FFI_Error_Create = create_error;
  api.XLA_FFI_Stream_Get = get_stream;
  api.XLA_FFI_DeviceOrdinal_Get = get_device;
  XLA_FFI_Buffer described[32] = {};
  void* pointers[32];
  for (int i = 0; i < count; ++i) {
    described[i].data = buffers[i];
    pointers[i] = &described[i];
  }
  XLA_FFI_Scalar scalar = {XLA_FFI_DataType_S64, &plan};
  void* attributes[] = {&scalar};
  XLA_FFI_CallFrame frame = {};
  frame.api = &api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args.size = inputs, frame.args.args = pointers;
  frame.rets.size = count - inputs, frame.rets.rets = pointers + inputs;
  frame.attrs.size = 1, frame.attrs.attrs = attributes;
  return handler(&frame) != nullptr;
}

// Asks a handler for its traits, as XLA does when it is registered.
extern "C" int traits_of(XLA_FFI_Handler* handler) {
  XLA_FFI_Metadata metadata = {};
  XLA_FFI_Metadata_Extension extension = {};
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame = {};
  frame.extension_start = &extension.extension_base;
  if (handler(&frame) || metadata.api_version.minor_version != XLA_FFI_API_MINOR) return -1;
  return static_cast<int>(metadata.traits);
}
