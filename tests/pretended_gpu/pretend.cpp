// A CUDA device whose memory is the host's, for a CPU build of PyTorch: a device guard, CUDA's hooks, allocators of
// device and pinned memory, random generators, DDP's timer, and one boxed fallback that runs the CPU's kernel of each
// operator on the same memory. pretend.py compiles it, says which operators CUDA checks, lacks or waits for, and counts.
// Written for the torch of constraints.txt.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {
using namespace c10;
constexpr auto KIND = DeviceType::CUDA;

DeviceIndex count() {
  static const DeviceIndex n = [] { auto s = std::getenv("PRETEND_DEVICES"); return DeviceIndex(s ? std::atoi(s) : 1); }();
  return n;
}
thread_local DeviceIndex current = 0;  // as in CUDA: a matter of the thread
DeviceIndex resolved(DeviceIndex i) { return i < 0 ? current : i; }

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device d) const override { auto old = Device(KIND, current); current = d.index(); return old; }
  Device getDevice() const override { return Device(KIND, current); }
  void setDevice(Device d) const override { current = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { current = d.index(); }
  Stream getStream(Device d) const override { return Stream(Stream::DEFAULT, Device(KIND, resolved(d.index()))); }
  Stream getDefaultStream(Device d) const override { return getStream(d); }
  Stream getNewStream(Device d, int = 0) const override { return getStream(d); }
  Stream getStreamFromGlobalPool(Device d, bool = false) const override { return getStream(d); }
  Stream exchangeStream(Stream s) const override { return getStream(s.device()); }
  DeviceIndex deviceCount() const noexcept override { return count(); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

// ---- memory: the host's, counted
std::mutex lock;
std::map<void*, size_t> device_blocks, pinned_blocks;
std::atomic<int64_t> allocated{0}, peak{0};

void free_device(void* p) {
  { std::lock_guard g(lock); auto it = device_blocks.find(p); allocated -= it->second; device_blocks.erase(it); }
  std::free(p);
}
void free_pinned(void* p) { { std::lock_guard g(lock); pinned_blocks.erase(p); } std::free(p); }

void* take(size_t n, std::map<void*, size_t>& blocks) {
  void* p = nullptr;
  TORCH_CHECK(posix_memalign(&p, 64, n ? n : 1) == 0, "out of memory");
  std::lock_guard g(lock);
  blocks[p] = n;
  return p;
}
struct DeviceAllocator final : Allocator {
  DataPtr allocate(size_t n) override {
    auto d = Device(KIND, current);
    if (!n) return {nullptr, nullptr, &noop, d};
    void* p = take(n, device_blocks);
    int64_t now = (allocated += n), seen = peak;
    while (now > seen && !peak.compare_exchange_weak(seen, now)) {}
    return {p, p, &free_device, d};
  }
  static void noop(void*) {}
  DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} device_allocator;

struct PinnedAllocator final : at::HostAllocator {
  DataPtr allocate(size_t n) override { void* p = take(n, pinned_blocks); return {p, p, &free_pinned, Device(kCPU)}; }
  DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_allocator;

bool pinned(const void* p) {
  std::lock_guard g(lock);
  auto it = pinned_blocks.upper_bound(const_cast<void*>(p));
  if (it == pinned_blocks.begin()) return false;
  --it;
  return p < static_cast<const char*>(it->first) + std::max<size_t>(it->second, 1);
}

// ---- random numbers: a seed and an offset, as CUDA's; each use of it takes a CPU generator made of both
struct Generator final : GeneratorImpl {
  explicit Generator(DeviceIndex i) : GeneratorImpl(Device(KIND, i), DispatchKeySet(DispatchKey::CUDA)) {}
  uint64_t value = default_rng_seed_val, offset = 0;
  void set_current_seed(uint64_t s) override { value = s; offset = 0; }
  void set_offset(uint64_t o) override { offset = o; }
  uint64_t get_offset() const override { return offset; }
  uint64_t current_seed() const override { return value; }
  uint64_t seed() override { set_current_seed(c10::detail::getNonDeterministicRandom(true)); return value; }
  void set_state(const TensorImpl& t) override {
    TORCH_CHECK(t.device().is_cpu() && t.numel() == 16 && t.dtype() == ScalarType::Byte, "RNG state must be a torch.ByteTensor of 16 bytes");
    std::memcpy(&value, t.data(), 8);
    std::memcpy(&offset, static_cast<const char*>(t.data()) + 8, 8);
  }
  intrusive_ptr<TensorImpl> get_state() const override {
    auto t = at::detail::empty_cpu({16}, ScalarType::Byte, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
    std::memcpy(t.data_ptr(), &value, 8);
    std::memcpy(static_cast<char*>(t.data_ptr()) + 8, &offset, 8);
    return t.getIntrusivePtr();
  }
  Generator* clone_impl() const override { auto g = new Generator(device().index()); g->value = value; g->offset = offset; return g; }
};
at::Generator of_the_host(const at::Generator& g) {
  TORCH_CHECK(g.device().type() == KIND, "Expected a 'cuda' device type for generator but found '", g.device().type(), "'");
  auto* ours = static_cast<Generator*>(g.unsafeGetGeneratorImpl());
  return at::detail::createCPUGenerator(ours->value * 0x9E3779B97F4A7C15ull + 0xD1B54A32D192ED03ull * ++ours->offset);
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex deviceCount() const override { return count(); }
  int getNumGPUs() const override { return count(); }
  void setCurrentDevice(DeviceIndex i) const override { current = i; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex i) const override { return std::exchange(current, i); }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return std::exchange(current, i); }
  void deviceSynchronize(DeviceIndex) const override {}
  std::string showConfig() const override { return "pretend"; }
  bool isPinnedPtr(const void* p) const override { return pinned(p); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(KIND, current); }
  at::Generator getNewGenerator(DeviceIndex i = -1) const override { return at::make_generator<Generator>(resolved(i)); }
  const at::Generator& getDefaultGenerator(DeviceIndex i = -1) const override {
    static std::vector<at::Generator> all = [this] { std::vector<at::Generator> v; for (DeviceIndex j = 0; j < count(); ++j) v.push_back(getNewGenerator(j)); return v; }();
    return all[resolved(i)];
  }
};


// ---- kernels: the host's, on the same memory
struct On {  // the device of a factory
  DeviceIndex old = current;
  explicit On(std::optional<Device> d) {
    const auto wanted = d && d->has_index() ? d->index() : current;
    TORCH_CHECK(wanted < count(), "CUDA error: invalid device ordinal");
    current = wanted;
  }
  ~On() { current = old; }
};
// What a GPU's memory holds before it is written is what was there before, seldom 0 as here: with PRETEND_POISON it is NaN.
at::Tensor poisoned(at::Tensor t) {
  static const bool on = std::getenv("PRETEND_POISON") != nullptr;
  if (!on || !t.numel()) return t;
  const auto kind = t.scalar_type();
  auto* p = static_cast<char*>(t.storage().mutable_data());
  const auto n = t.storage().nbytes();
  if (at::isFloatingType(kind)) std::memset(p, 0xFF, n);
  else if (kind == ScalarType::Bool) std::memset(p, 1, n);
  else std::memset(p, 0x77, n);
  return t;
}
at::Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
                 std::optional<bool> pin, std::optional<MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  On on(device);
  return poisoned(at::detail::empty_generic(size, &device_allocator, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype), format));
}
at::Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                         std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  On on(device);
  return poisoned(at::detail::empty_strided_generic(size, stride, &device_allocator, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype)));
}
at::Tensor& set_nothing(at::Tensor& self) {
  On on(self.device());
  Storage none(Storage::use_byte_size_t(), 0, device_allocator.allocate(0), &device_allocator, true);
  return self.set_(none, 0, {0}, {});
}

using Storages = std::vector<std::pair<Storage, Storage>>;  // of the device, of the host

Storage host_storage(const Storage& s, Storages& seen) {
  for (auto& [device, host] : seen) if (device.unsafeGetStorageImpl() == s.unsafeGetStorageImpl()) return host;
  DataPtr p(const_cast<void*>(s.data()), new Storage(s), [](void* c) { delete static_cast<Storage*>(c); }, Device(kCPU));
  Storage host(Storage::use_byte_size_t(), s.nbytes(), std::move(p), GetAllocator(kCPU), true);
  seen.emplace_back(s, host);
  return host;
}
struct Held { Storage host; int64_t bytes; };
Storage device_storage(const Storage& s, Device d, Storages& seen) {
  for (auto& [device, host] : seen) if (host.unsafeGetStorageImpl() == s.unsafeGetStorageImpl()) return device;
  auto* held = new Held{s, int64_t(s.nbytes())};
  int64_t now = (allocated += held->bytes), top = peak;
  while (now > top && !peak.compare_exchange_weak(top, now)) {}
  DataPtr p(const_cast<void*>(s.data()), held, [](void* c) { auto* h = static_cast<Held*>(c); allocated -= h->bytes; delete h; }, d);
  Storage device(Storage::use_byte_size_t(), s.nbytes(), std::move(p), &device_allocator, true);
  seen.emplace_back(device, s);
  return device;
}
at::Tensor with(Storage s, DispatchKey key, const at::Tensor& like) {
  auto t = at::detail::make_tensor<TensorImpl>(std::move(s), DispatchKeySet(key), like.dtype());
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.is_conj()) t._set_conj(true);
  if (like.is_neg()) t._set_neg(true);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return t;
}
at::Tensor to_host(const at::Tensor& t, Storages& seen) { return with(host_storage(t.storage(), seen), DispatchKey::CPU, t); }

void note(const char* kind, const std::string& what, int64_t bytes) {
  static auto op = Dispatcher::singleton().findSchemaOrThrow("pretend::note", "").typed<void(std::string_view, std::string_view, int64_t)>();
  op.call(kind, what, bytes);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  Storages seen;
  bool to = self.is_cuda(), from = src.is_cuda();
  auto host = to ? to_host(self, seen) : self;
  host.copy_(from ? to_host(src, seen) : src);
  if (self.device() == src.device() || !self.numel()) return self;
  if (to && from) note("peer", "copy_", self.nbytes());
  else if (to) note(non_blocking ? (src.is_pinned() ? "h2d_pinned_async" : "h2d_async") : "h2d", "copy_", self.nbytes());
  else note(non_blocking && self.is_pinned() ? "d2h_async" : "d2h", "copy_", self.nbytes());
  return self;
}

enum Rule : int64_t { STRICT = 1, SYNC = 2, NATIVE = 4, MISSING = 8, FLOATS = 16, RANDOM_ORDER = 32 };
std::unordered_map<std::string, int64_t>& rules() { static std::unordered_map<std::string, int64_t> r; return r; }

struct Seeded {  // kernels that draw without a generator: the host's default one stands in for the device's
  at::Generator g = at::detail::getDefaultCPUGenerator();
  at::Tensor kept;
  explicit Seeded(const at::Generator& mine) {
    std::lock_guard l(g.mutex());
    kept = at::Tensor(g.unsafeGetGeneratorImpl()->get_state());
    g.set_current_seed(of_the_host(mine).current_seed());
  }
  ~Seeded() { std::lock_guard l(g.mutex()); g.unsafeGetGeneratorImpl()->set_state(*kept.unsafeGetTensorImpl()); }
};

void fallback(const OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  auto found = rules().find(name);
  const int64_t rule = found == rules().end() ? 0 : found->second;
  at::AutoDispatchBelowADInplaceOrView below;
  impl::ExcludeDispatchKeyGuard exact(autocast_dispatch_keyset);  // the host's autocast is none of the device's
  if (rule & NATIVE) return op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  TORCH_CHECK_NOT_IMPLEMENTED(!(rule & MISSING), "Could not run '", name, "' with arguments from the 'CUDA' backend (no kernel of CUDA).");

  const auto n = schema.arguments().size();
  const auto begin = stack->size() - n;
  std::optional<Device> device;
  std::vector<std::pair<at::Tensor, at::Tensor>> moved;  // of the device, of the host
  Storages seen;
  bool drawn = false, numbers = false;

  auto look = [&](const at::Tensor& t) { if (t.defined() && t.is_cuda() && !device) device = t.device(); };
  for (size_t i = 0; i < n; ++i) {
    auto& v = (*stack)[begin + i];
    if (v.isTensor()) look(v.toTensor());
    else if (v.isTensorList()) for (const at::Tensor& t : v.toTensorVector()) look(t);
    else if (v.isList()) { for (const IValue& e : v.toListRef()) if (e.isTensor()) look(e.toTensor()); }
    else if (v.isDevice() && !device && v.toDevice().is_cuda()) device = Device(KIND, resolved(v.toDevice().index()));
  }
  TORCH_CHECK(device, "pretend: ", name, " reached the device without one");

  const bool puts = name == "aten::_index_put_impl_", indexes = puts || name == "aten::index.Tensor_out";
  auto move = [&](const at::Tensor& t, const Argument& arg, bool written) -> at::Tensor {
    if (!t.defined()) return t;
    const bool index = indexes && arg.name() == "indices" && (t.device().is_cpu() || t.device() == *device);
    if (index && puts && t.device().is_cpu()) note("h2d", name + " (index on the host)", t.nbytes());
    if (t.device() != *device && !index) {
      const bool scalar = t.device().is_cpu() && t.dim() == 0 && !written;
      if (rule & STRICT)
        TORCH_CHECK(false, "Expected all tensors to be on the same device, but got ", arg.name(), " is on ", t.device(),
                    ", different from other tensors on ", *device, " (when checking argument in method wrapper_CUDA_", name, ")");
      TORCH_CHECK(scalar, "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ", t.device(), "! (", name, ")");
    }
    if (rule & FLOATS) TORCH_CHECK_NOT_IMPLEMENTED(!at::isIntegralType(t.scalar_type(), true), "\"", name, "_cuda\" not implemented for '", toString(t.scalar_type()), "'");
    if (!t.is_cuda()) return t;
    for (auto& [mine, host] : moved) if (mine.is_same(t)) return host;
    moved.emplace_back(t, to_host(t, seen));
    return moved.back().second;
  };
  // calls that wait for some arguments only
  bool waits = name == "aten::masked_fill_.Tensor" && (*stack)[begin + 2].toTensor().is_cuda();
  waits |= name == "aten::repeat_interleave.Tensor" && (*stack)[begin + 1].isNone();
  if (puts) {  // a mask is looked for its True entries, but where one number of the host is filled in
    const auto value = (*stack)[begin + 2].toTensor();
    int64_t masks = 0, others = 0;
    for (const IValue& e : (*stack)[begin + 1].toListRef())
      if (e.isTensor() && e.toTensor().defined()) {
        const auto& t = e.toTensor();
        const bool mask = (t.scalar_type() == ScalarType::Bool || t.scalar_type() == ScalarType::Byte) && t.is_cuda();
        (mask ? masks : others) += 1;
      }
    const bool filled = masks == 1 && !others && value.numel() == 1 && value.device().is_cpu();
    waits |= masks && !filled;
    // One number of the host is copied first: x[index] = 1.
    if (!filled && value.device().is_cpu() && value.dim() == 0) note("h2d", name + " (number of the host)", value.nbytes());
  }
  const auto& mine = at::detail::getCUDAHooks().getDefaultGenerator(device->index());
  for (size_t i = 0; i < n; ++i) {
    auto& v = (*stack)[begin + i];
    const auto& arg = schema.arguments()[i];
    const bool written = arg.alias_info() && arg.alias_info()->isWrite();
    if (v.isTensor()) v = move(v.toTensor(), arg, written);
    else if (v.isTensorList()) { c10::List<at::Tensor> l; for (const at::Tensor& t : v.toTensorVector()) l.push_back(move(t, arg, written)); v = l; }
    else if (v.isList() && arg.type()->str().find("Tensor") != std::string::npos) {
      c10::List<std::optional<at::Tensor>> l;
      for (const IValue& e : v.toListRef()) l.push_back(e.isTensor() ? std::optional(move(e.toTensor(), arg, written)) : std::nullopt);
      v = l;
    } else if (v.isDevice() && v.toDevice().is_cuda()) v = Device(kCPU);
    else if (v.isGenerator()) { v = of_the_host(v.toGenerator()); numbers = true; }
    else if (v.isNone() && arg.type()->str().find("Generator") != std::string::npos) { v = of_the_host(mine); numbers = true; }
  }
  std::optional<ScalarType> counted;  // integers are counted by CUDA alone
  if (name == "aten::histc" && at::isIntegralType((*stack)[begin].toTensor().scalar_type(), false)) {
    counted = (*stack)[begin].toTensor().scalar_type();
    (*stack)[begin] = (*stack)[begin].toTensor().to(ScalarType::Float);
  }
  // float16 in, float32 out: kernels of CUDA alone. (_softmax, dim, half_to_float) and (grad, output, dim, input_dtype).
  at::Tensor narrow;
  if ((name == "aten::_softmax.out" || name == "aten::_log_softmax.out") && (*stack)[begin + 2].toBool()) {
    (*stack)[begin] = (*stack)[begin].toTensor().to(ScalarType::Float);
    (*stack)[begin + 2] = false;
  }
  if (name == "aten::_softmax_backward_data.out" || name == "aten::_log_softmax_backward_data.out") {
    const auto grad = (*stack)[begin].toTensor();
    if (grad.scalar_type() != static_cast<ScalarType>((*stack)[begin + 3].toInt())) {
      narrow = (*stack)[begin + 4].toTensor();
      (*stack)[begin + 3] = static_cast<int64_t>(grad.scalar_type());
      (*stack)[begin + 4] = grad.clone();
    }
  }
  // As the documentation of torch.use_deterministic_algorithms says; of cumsum, floating point alone.
  if (rule & RANDOM_ORDER && (name != "aten::cumsum.out" || at::isFloatingType((*stack)[begin].toTensor().scalar_type())))
    at::globalContext().alertNotDeterministic(name + "_cuda");
  if (rule & SYNC) note("sync", name, 0);
  if (waits) note("sync", name, 0);
  drawn = name == "aten::native_dropout" || name == "aten::rrelu_with_noise";
  if (drawn && !numbers) { Seeded seeded(mine); op.callBoxed(stack); } else op.callBoxed(stack);

  if (counted) stack->back() = stack->back().toTensor().to(*counted);
  if (narrow.defined()) { narrow.copy_(stack->back().toTensor()); stack->back() = narrow; }

  // what was resized
  for (auto& [t, host] : moved) {
    if (t.sizes() == host.sizes() && t.strides() == host.strides() && t.const_data_ptr() == host.const_data_ptr()) continue;
    if (t.const_data_ptr() != host.const_data_ptr()) {
      Storages fresh;
      Storage s(Storage::use_byte_size_t(), host.storage().nbytes(), host.storage().unsafeGetStorageImpl()->set_data_ptr(DataPtr()), GetAllocator(kCPU), true);
      t.unsafeGetTensorImpl()->set_storage_keep_dtype(device_storage(s, *device, fresh));
    }
    t.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
  }
  auto back = [&](const at::Tensor& t) -> at::Tensor {
    if (!t.defined()) return t;
    for (auto& [m, host] : moved) if (host.is_same(t)) return m;
    return with(device_storage(t.storage(), *device, seen), DispatchKey::CUDA, t);
  };
  const auto returned = schema.returns().size();
  for (size_t i = stack->size() - returned; i < stack->size(); ++i) {
    auto& v = (*stack)[i];
    if (v.isTensor()) v = back(v.toTensor());
    else if (v.isTensorList()) { c10::List<at::Tensor> l; for (const at::Tensor& t : v.toTensorVector()) l.push_back(back(t)); v = l; }
  }
}

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
struct Start {
  Start() {
    SetAllocator(KIND, &device_allocator);
    at::setHostAllocator(KIND, &pinned_allocator);
    // PyTorch makes its hooks once, when something first asks for them, and `import torch` has asked. They have no
    // members, so that the table of ours can stand in for theirs.
    static Hooks hooks{at::CUDAHooksArgs{}};
    auto& theirs = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
    static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
    *reinterpret_cast<void**>(&theirs) = *reinterpret_cast<void**>(&hooks);
  }
} start;
}  // namespace

namespace c10d {  // what DDP takes the time with
struct PretendTimer final : Timer {
  explicit PretendTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, PretendTimer)
}  // namespace c10d

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("set_", &set_nothing);
  m.impl("copy_", &copy_);
  m.impl("record_stream", [](at::Tensor&, Stream) {});
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY(pretend, m) {
  m.def("device() -> int", []() -> int64_t { return current; });
  m.def("set_device(int i) -> int", [](int64_t i) -> int64_t { TORCH_CHECK(i < count(), "invalid device ordinal"); return i < 0 ? current : std::exchange(current, DeviceIndex(i)); });
  m.def("devices() -> int", []() -> int64_t { return count(); });
  m.def("allocated() -> int", []() -> int64_t { return allocated; });
  m.def("peak(bool reset) -> int", [](bool reset) -> int64_t { int64_t p = peak; if (reset) peak = allocated.load(); return p; });
  m.def("default_generator(int i) -> Generator?", [](int64_t i) -> std::optional<at::Generator> { return at::detail::getCUDAHooks().getDefaultGenerator(DeviceIndex(i)); });
  m.def("resize_storage(Tensor t, int bytes) -> ()", [](const at::Tensor& t, int64_t bytes) {
    auto* s = t.storage().unsafeGetStorageImpl();
    On on(t.device());
    auto fresh = device_allocator.allocate(bytes);
    if (auto n = std::min<size_t>(bytes, s->nbytes())) std::memcpy(fresh.get(), s->data(), n);
    s->set_data_ptr_noswap(std::move(fresh));
    s->set_nbytes(bytes);
  });
  m.def("note(str kind, str what, int bytes) -> ()");
  m.def("rule(str op, int bits) -> ()", [](std::string_view op, int64_t bits) { rules()[std::string(op)] |= bits; });
  m.def("host(Tensor t) -> Tensor", [](const at::Tensor& t) { Storages seen; return t.is_cuda() ? to_host(t, seen) : t; });
}
