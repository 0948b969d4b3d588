// The handler of XLA's custom calls: writes the addresses of XLA's buffers into the arguments of a
// plan's kernels, and starts them in XLA's stream. It calls no Python, except before the first run
// of a plan on a device.
//
// A program is an array of int64, which custom_calls.py writes (`encode`). Memory for arguments is
// on the stack, so threads share nothing that is written.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "xla/ffi/api/c_api.h"

namespace {

using Word = int64_t;
constexpr int max_devices = 64, max_words = 4096 / sizeof(Word), max_arguments = 64, max_maps = 16;
constexpr int map_words = 16;  // of the driver's CUtensorMap
constexpr int buckets = 1024;

struct Plan {
  Word number;
  const Word* programs[max_devices];  // null until the plan has been prepared on a device
  Plan* next;
};

struct LaunchAttribute {  // the driver's CUlaunchAttribute
  int id, padding, value[16];
};

struct LaunchConfig {  // the driver's CUlaunchConfig
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct Driver {
  int (*get_context)(void**);
  int (*set_context)(void*);
  int (*launch)(const LaunchConfig*, void* function, void** arguments, void** extra);
  int (*replace_address)(void* map, void* address);
};

// Prepares a plan on a device, and adds it; returns false with a message if that failed.
using Prepare = bool (*)(Word number, int device, char* message, size_t size);

Plan* plans[buckets];
Driver driver;
Prepare prepare;

Plan** place_of(Word number) {
  return &plans[static_cast<uint64_t>(number) % buckets];
}

const Word* find(Word number, int device) {
  Plan* plan = __atomic_load_n(place_of(number), __ATOMIC_ACQUIRE);
  while (plan && plan->number != number) plan = plan->next;
  return plan ? __atomic_load_n(&plan->programs[device], __ATOMIC_ACQUIRE) : nullptr;
}

XLA_FFI_Error* failed(const XLA_FFI_Api* api, const char* message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message,
                                    XLA_FFI_Error_Code_INTERNAL};
  return api->XLA_FFI_Error_Create(&args);
}

// The buffers of a call: its arguments, then its results.
struct Buffers {
  const XLA_FFI_CallFrame* frame;

  char* operator[](Word at) const {
    const Word inputs = frame->args.size;
    void* buffer = at < inputs ? frame->args.args[at] : frame->rets.rets[at - inputs];
    return static_cast<char*>(static_cast<XLA_FFI_Buffer*>(buffer)->data);
  }
};

// Starts the launch that begins at a word of a program; returns a CUresult and moves on.
int start(const Word*& word, const Buffers& buffers, void* stream) {
  void* function = reinterpret_cast<void*>(word[0]);
  LaunchAttribute early = {6, 0, {1}};  // programmatic stream serialization
  const LaunchConfig config = {{unsigned(word[1]), unsigned(word[2]), unsigned(word[3])},
                               {unsigned(word[4]), 1, 1},
                               unsigned(word[5]),
                               stream,
                               &early,
                               unsigned(word[6])};
  const Word arguments = word[7], words = word[8], addresses = word[9], maps = word[10];
  word += 11;
  Word memory[max_words];
  alignas(64) Word of_maps[max_maps][map_words];
  void* table[max_arguments];
  for (Word i = 0; i < arguments; ++i) table[i] = memory + word[i];
  word += arguments;
  memcpy(memory, word, words * sizeof(Word));
  word += words;
  for (Word i = 0; i < addresses; ++i, word += 3)
    memory[word[0]] = reinterpret_cast<Word>(buffers[word[1]] + word[2]);
  for (Word i = 0; i < maps; ++i, word += 3 + map_words) {
    memcpy(of_maps[i], word + 3, sizeof(of_maps[i]));
    table[word[0]] = of_maps[i];
    if (word[1] < 0) continue;  // of an array without elements
    if (int error = driver.replace_address(of_maps[i], buffers[word[1]] + word[2])) return error;
  }
  return driver.launch(&config, function, table, nullptr);
}

int run(const Word* word, const Buffers& buffers, void* stream) {
  void* context = nullptr;
  const Word launches = *word++;
  void* own = reinterpret_cast<void*>(*word++);
  if (int error = driver.get_context(&context)) return error;
  if (context != own)
    if (int error = driver.set_context(own)) return error;
  for (Word i = 0; i < launches; ++i)
    if (int error = start(word, buffers, stream)) return error;
  return 0;
}

}  // namespace

extern "C" {

void cupyfa_begin(const Driver* functions, Prepare function) {
  driver = *functions;
  prepare = function;
}

// Adds a program; the caller holds a lock, and keeps the memory for ever.
void cupyfa_add(Word number, int device, const Word* program) {
  Plan* plan = *place_of(number);
  while (plan && plan->number != number) plan = plan->next;
  const bool is_new = !plan;
  if (is_new) {
    plan = static_cast<Plan*>(calloc(1, sizeof(Plan)));
    plan->number = number, plan->next = *place_of(number);
  }
  __atomic_store_n(&plan->programs[device], program, __ATOMIC_RELEASE);
  if (is_new) __atomic_store_n(place_of(number), plan, __ATOMIC_RELEASE);
}

XLA_FFI_Error* cupyfa_call(XLA_FFI_CallFrame* frame) {
  const auto* extension = frame->extension_start;
  if (extension && extension->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)extension)->metadata;
    metadata->api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                             XLA_FFI_API_MINOR};
    metadata->traits = XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;
    return nullptr;
  }
  const XLA_FFI_Api* api = frame->api;
  XLA_FFI_Stream_Get_Args stream = {XLA_FFI_Stream_Get_Args_STRUCT_SIZE, nullptr, frame->ctx,
                                    nullptr};
  if (XLA_FFI_Error* error = api->XLA_FFI_Stream_Get(&stream)) return error;
  XLA_FFI_DeviceOrdinal_Get_Args device = {XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, nullptr,
                                           frame->ctx, 0};
  if (XLA_FFI_Error* error = api->XLA_FFI_DeviceOrdinal_Get(&device)) return error;
  const int ordinal = device.device_ordinal;
  if (ordinal < 0 || ordinal >= max_devices) return failed(api, "cupyfa: too many devices");
  const XLA_FFI_Scalar* attribute = static_cast<XLA_FFI_Scalar*>(frame->attrs.attrs[0]);
  const Word number = *static_cast<const Word*>(attribute->value);
  const Word* program = find(number, ordinal);
  if (!program) {
    char message[1024] = "cupyfa: a plan could not be prepared";
    if (!prepare(number, ordinal, message, sizeof(message))) return failed(api, message);
    program = find(number, ordinal);
  }
  const int status = run(program, Buffers{frame}, stream.stream);
  if (!status) return nullptr;
  char message[] = "cupyfa: a launch failed with CUresult 0000";
  for (int i = 0, left = status; i < 4; ++i, left /= 10)
    message[sizeof(message) - 2 - i] = char('0' + left % 10);
  return failed(api, message);
}

}  // extern "C"
