// A ggml backend that plays GPUs: it records what a program asks of it, and does it late.
//
// Loaded into an unmodified program (LD_PRELOAD, GGML_BACKEND_PATH or dlopen), built against that
// program's own headers. The kernels are computed by ggml's CPU backend, so texts are right if the
// program orders its work rightly. Settings, all GGRAPH_RECORD_*: LOG, LIMIT, DEVICES, CONTRACT,
// ORDER, POISON, TRAP, THREADS.
#include "contract.hpp"
#include "queue.hpp"

#include <atomic>

#ifndef GGML_BACKEND_API_VERSION
#define GGML_BACKEND_API_VERSION 1
#endif

#define LOCKED std::lock_guard<std::recursive_mutex> locked_(g_mutex)

namespace {
constexpr int MOST_DEVICES = 8;
const int g_devices = std::max(1, std::min(MOST_DEVICES, atoi(setting("GGRAPH_RECORD_DEVICES", "1"))));
const bool g_trap = atoi(setting("GGRAPH_RECORD_TRAP", "1"));
char g_names[MOST_DEVICES][2][16]; // "sim0", "sim0_Host"
ggml_backend_device g_device[MOST_DEVICES];
ggml_backend_buffer_type g_type[MOST_DEVICES][2]; // device memory, pinned memory

// ---------------------------------------------------------------- buffers
struct Memory { char * base; size_t nbytes; int device; bool pinned; int id; };
int g_buffers = 0;
long g_gets = 0;
Memory & memory_of(ggml_backend_buffer_t b) { return *(Memory *) b->context; }
Stream & stream_of(ggml_backend_t b) { return *(Stream *) b->context; }

void wait_for_device(int device) {
    for (auto & s : g_queues.streams)
        if (s->alive && s->device == device) { g_log.line("{\"t\":\"sync\",\"be\":%d}", s->id); g_queues.finish(*s); }
}
// What the host does to a buffer: at once on CUDA, after the device's work elsewhere.
void before_host_access(const Memory & m) {
    g_queues.progress();
    if (contract().buffer_waits) wait_for_device(m.device);
}
void log_host(const char * what, const char * name, const void * read, const void * write, size_t n) {
    if (read && write) g_log.line("{\"t\":\"host\",\"what\":\"%s %s\",\"r\":[%llu,%zu],\"w\":[%llu,%zu]}", what, plain(name).c_str(), number(read), n, number(write), n);
    else g_log.line("{\"t\":\"host\",\"what\":\"%s %s\",\"%s\":[%llu,%zu]}", what, plain(name).c_str(), read ? "r" : "w", number(read ? read : write), n);
}
void buffer_free(ggml_backend_buffer_t b) {
    LOCKED;
    Memory * m = &memory_of(b);
    g_queues.progress();
    if (contract().free_waits && !m->pinned) wait_for_device(m->device);
    g_log.line("{\"t\":\"free\",\"buf\":%d}", m->id);
    // What is still to be run would write to whatever lies there next: then nothing ever does. The
    // log's reader sees the race.
    bool used = g_queues.will_touch(m->base, m->nbytes);
    if (!used && m->pinned) g_memory.unpin(m->base);
    if (!used && !m->pinned) munmap(m->base, m->nbytes);
    delete m;
}
void * buffer_base(ggml_backend_buffer_t b) { return memory_of(b).base; }
void buffer_memset(ggml_backend_buffer_t b, ggml_tensor * t, uint8_t value, size_t offset, size_t n) {
    LOCKED;
    before_host_access(memory_of(b));
    char * to = (char *) t->data + offset;
    log_host("memset", t->name, nullptr, to, n);
    g_memory.fill(to, value, n);
}
void buffer_set(ggml_backend_buffer_t b, ggml_tensor * t, const void * from, size_t offset, size_t n) {
    LOCKED;
    before_host_access(memory_of(b));
    char * to = (char *) t->data + offset;
    log_host("set", t->name, from, to, n);
    g_memory.move(to, from, n);
}
void buffer_get(ggml_backend_buffer_t b, const ggml_tensor * t, void * to, size_t offset, size_t n) {
    LOCKED;
    before_host_access(memory_of(b));
    const char * from = (const char *) t->data + offset;
    log_host("get", t->name, from, to, n);
    g_log.line("{\"t\":\"sum\",\"be\":-1,\"at\":%ld,\"sum\":%llu}", g_gets++, sum(from, n));
    g_memory.move(to, from, n);
}
bool is_ours(ggml_backend_buffer_t b);
bool buffer_copy(ggml_backend_buffer_t b, const ggml_tensor * src, ggml_tensor * dst) {
    LOCKED;
    if (!is_ours(src->buffer)) return false;
    before_host_access(memory_of(src->buffer));
    before_host_access(memory_of(b));
    log_host("copy", dst->name, src->data, dst->data, ggml_nbytes(src));
    g_memory.move(dst->data, src->data, ggml_nbytes(src));
    return true;
}
void buffer_clear(ggml_backend_buffer_t b, uint8_t value) {
    LOCKED;
    Memory & m = memory_of(b);
    before_host_access(m);
    log_host("clear", "buffer", nullptr, m.base, m.nbytes);
    if (value || m.pinned) g_memory.fill(m.base, value, m.nbytes);
    else madvise(m.base, m.nbytes, MADV_DONTNEED); // zero pages, as when it was mapped
}
const char * type_name(ggml_backend_buffer_type_t t) { return (const char *) t->context; }
bool type_is_pinned(ggml_backend_buffer_type_t t) { return t == &g_type[0][1] || strstr(type_name(t), "_Host"); }
size_t type_alignment(ggml_backend_buffer_type_t) { return 128; }
int device_of(ggml_backend_buffer_type_t t) { return type_name(t)[3] - '0'; }
ggml_backend_buffer_t type_alloc(ggml_backend_buffer_type_t t, size_t n) {
    LOCKED;
    size_t nbytes = (n + 2 * PAGE - 1) / PAGE * PAGE;
    bool pinned = type_is_pinned(t);
    void * base = pinned ? g_memory.pin(nbytes) : mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!base || base == MAP_FAILED) return nullptr;
    g_memory.replaced(base, nbytes);
    auto * m = new Memory { (char *) base, nbytes, device_of(t), pinned, g_buffers++ };
    g_log.line("{\"t\":\"alloc\",\"buf\":%d,\"host\":%d,\"dev\":%d,\"base\":%llu,\"n\":%zu}", m->id, pinned, m->device, number(base), nbytes);
    ggml_backend_buffer_i i = {}; // what later versions add is optional
    i.free_buffer = buffer_free; i.get_base = buffer_base; i.memset_tensor = buffer_memset;
    i.set_tensor = buffer_set; i.get_tensor = buffer_get; i.cpy_tensor = buffer_copy; i.clear = buffer_clear;
    return ggml_backend_buffer_init(t, i, m, n);
}
bool is_ours(ggml_backend_buffer_t b) { return b && b->buft->iface.alloc_buffer == type_alloc; }

// ---------------------------------------------------------------- streams
ggml_guid_t guid() { static ggml_guid g = { 0x67, 0x67, 0x72, 0x61, 0x70, 0x68, 0, 1 }; return &g; }
bool is_ours(ggml_backend_t b) { return b && b->guid == guid(); }
const char * backend_name(ggml_backend_t b) { return g_names[stream_of(b).device][0]; }
void synchronize(Stream & s) { g_log.line("{\"t\":\"sync\",\"be\":%d}", s.id); g_queues.finish(s); }
void backend_free(ggml_backend_t b) { LOCKED; synchronize(stream_of(b)); stream_of(b).alive = false; delete b; }
void backend_synchronize(ggml_backend_t b) { LOCKED; g_queues.progress(); synchronize(stream_of(b)); }

void enqueue_copy(Stream & s, const char * what, const char * name, void * dst, const void * src, size_t n, bool staged) {
    Command c { Command::COPY };
    c.dst = dst; c.src = src; c.nbytes = n; c.result = what[1] == '2' && what[2] == 'H';
    if (staged) { c.staged.resize(n); g_memory.move(c.staged.data(), src, n); }
    g_log.line("{\"t\":\"copy\",\"be\":%d,\"what\":\"%s %s\",\"src\":%llu,\"dst\":%llu,\"n\":%zu}", s.id, what, plain(name).c_str(), staged ? 0 : number(src), number(dst), n);
    g_queues.push(s, std::move(c));
}
void record(Stream & s, const EventPtr & e) { g_log.line("{\"t\":\"rec\",\"be\":%d,\"ev\":%d}", s.id, e->id); g_queues.record(s, e); }
void wait(Stream & s, const EventPtr & e) { g_log.line("{\"t\":\"wait\",\"be\":%d,\"ev\":%d}", s.id, e->id); g_queues.wait(s, e); }
std::atomic<int> g_events { 0 };
EventPtr new_event() { auto e = std::make_shared<Event>(); e->id = g_events++; return e; }

void backend_set(ggml_backend_t b, ggml_tensor * t, const void * from, size_t offset, size_t n) {
    LOCKED;
    g_queues.progress();
    Stream & s = stream_of(b);
    bool staged = !g_memory.mapping(from) && contract().set == Contract::AT_CALL;
    if (staged) log_host("stage", t->name, from, nullptr, n);
    enqueue_copy(s, "H2D", t->name, (char *) t->data + offset, from, n, staged);
    if (!staged) g_memory.take_off({ s.id, s.enqueued - 1, (uintptr_t) from, (uintptr_t) from + n, false });
    if (!g_memory.mapping(from) && contract().set == Contract::WAITS) synchronize(s);
    g_queues.progress();
}
void backend_get(ggml_backend_t b, const ggml_tensor * t, void * to, size_t offset, size_t n) {
    LOCKED;
    g_queues.progress();
    Stream & s = stream_of(b);
    enqueue_copy(s, "D2H", t->name, to, (const char *) t->data + offset, n, false);
    if (!g_memory.mapping(to) && contract().get == Contract::WAITS) synchronize(s);
    else g_memory.take_off({ s.id, s.enqueued - 1, (uintptr_t) to, (uintptr_t) to + n, true });
    g_queues.progress();
}
// A copy between devices, with the waits that the contract adds by itself.
void copy_between(Stream & from, Stream & to, const ggml_tensor * src, ggml_tensor * dst) {
    EventPtr before = new_event(), after = new_event();
    if (contract().peer == Contract::HANDSHAKE) { record(to, before); wait(from, before); }
    if (contract().peer == Contract::ON_TARGET) { record(from, before); wait(to, before); }
    Stream & on = contract().peer == Contract::ON_TARGET ? to : from;
    enqueue_copy(on, "copy", dst->name, dst->data, src->data, ggml_nbytes(src), false);
    if (contract().peer != Contract::ON_TARGET) { record(from, after); wait(to, after); }
}
bool backend_copy(ggml_backend_t bs, ggml_backend_t bd, const ggml_tensor * src, ggml_tensor * dst) {
    LOCKED;
    if (!is_ours(bs) || !is_ours(bd) || !is_ours(src->buffer) || !is_ours(dst->buffer)) return false;
    if (memory_of(src->buffer).pinned || memory_of(dst->buffer).pinned) return false;
    if (bs != bd && contract().peer == Contract::NONE) return false;
    g_queues.progress();
    if (bs == bd) enqueue_copy(stream_of(bs), "copy", dst->name, dst->data, src->data, ggml_nbytes(src), false);
    else copy_between(stream_of(bs), stream_of(bd), src, dst);
    g_queues.progress();
    return true;
}
EventPtr & event_of(ggml_backend_event_t e) { return *(EventPtr *) e->context; }
void backend_record(ggml_backend_t b, ggml_backend_event_t e) { LOCKED; record(stream_of(b), event_of(e)); g_queues.progress(); }
void event_synchronize(ggml_backend_dev_t, ggml_backend_event_t e) {
    LOCKED;
    g_queues.progress();
    g_log.line("{\"t\":\"sync\",\"ev\":%d}", event_of(e)->id);
    g_queues.finish(event_of(e));
}
void backend_wait(ggml_backend_t b, ggml_backend_event_t e) {
    LOCKED;
    if (contract().wait == Contract::HOST) return event_synchronize(nullptr, e);
    if (contract().wait == Contract::STREAM) wait(stream_of(b), event_of(e));
    g_queues.progress();
}

// ---------------------------------------------------------------- kernels
#if GGML_BACKEND_API_VERSION >= 2
bool computes(const ggml_tensor * t) { return t->flags & GGML_TENSOR_FLAG_COMPUTE; } // others give their shape only
#else
bool computes(const ggml_tensor *) { return true; }
#endif
bool is_kernel(const ggml_tensor * t) {
    bool view = t->op == GGML_OP_NONE || t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE;
    return computes(t) && !view && ggml_nelements(t) > 0;
}
// ["OP","name",[address,bytes],contiguous or not,[[address,bytes,"root's name",writer],...],view]. A
// view is an operation that the program itself has put onto its source's bytes (ggml_norm_inplace). The
// writer is the kernel of this list that wrote the root last, -1 for none: what the source means.
using Writers = std::unordered_map<const ggml_tensor *, int>;
const ggml_tensor * root_of(const ggml_tensor * t) { return t->view_src ? t->view_src : t; }
std::string line_of(const ggml_tensor * t, const Writers & writers) {
    auto range = [](const ggml_tensor * x) { return std::to_string(number(x->data)) + "," + std::to_string(ggml_nbytes(x)); };
    std::string out = "[\"" + std::string(ggml_op_name(t->op)) + "\",\"" + plain(t->name) + "\",[" + range(t) + "],";
    out += std::string(ggml_is_contiguous(t) ? "1" : "0") + ",[";
    bool first = true;
    for (auto * x : t->src) {
        if (!x || !x->data) continue;
        auto writer = writers.find(root_of(x));
        out += std::string(first ? "[" : ",[") + range(x) + ",\"" + plain(root_of(x)->name) + "\"," + std::to_string(writer == writers.end() ? -1 : writer->second) + "]";
        first = false;
    }
    return out + (t->view_src ? "],1]" : "],0]");
}
void log_graph(int stream, ggml_cgraph * g) {
    if (!g_log.on()) return;
    std::string nodes;
    Writers writers;
    int count = 0;
    for (int i = 0; i < ggml_graph_n_nodes(g); i++) {
        const ggml_tensor * t = ggml_graph_node(g, i);
        if (!is_kernel(t)) continue;
        nodes += (nodes.empty() ? "" : ",") + line_of(t, writers);
        writers[root_of(t)] = count++;
    }
    int id = g_log.list(nodes);
    g_log.line("{\"t\":\"graph\",\"be\":%d,\"id\":%d}", stream, id);
}
ggml_status backend_compute(ggml_backend_t b, ggml_cgraph * g) {
    LOCKED;
    g_memory.armed = g_trap;
    g_queues.progress();
    log_graph(stream_of(b).id, g);
    auto tensors = std::make_shared<Tensors>();
    std::unordered_map<const ggml_tensor *, ggml_tensor *> copies;
    auto copied = [&](const ggml_tensor * t) -> ggml_tensor * {
        if (!t) return nullptr;
        ggml_tensor *& copy = copies[t];
        if (!copy) { tensors->emplace_back(new ggml_tensor(*t)); copy = tensors->back().get(); copy->view_src = nullptr; for (auto *& x : copy->src) x = nullptr; }
        return copy;
    };
    for (int i = 0; i < ggml_graph_n_nodes(g); i++) {
        ggml_tensor * t = ggml_graph_node(g, i);
        if (!is_kernel(t)) continue;
        Command c { Command::KERNEL };
        c.node = copied(t); c.tensors = tensors;
        for (int k = 0; k < GGML_MAX_SRC; k++) c.node->src[k] = copied(t->src[k]);
        c.node->view_src = copied(t->view_src);
        g_queues.push(stream_of(b), std::move(c));
    }
    g_queues.progress();
    return GGML_STATUS_SUCCESS;
}

// ---------------------------------------------------------------- the CPU backend, which is the host
ggml_backend_dev_t cpu() { static ggml_backend_dev_t d = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); return d; }
ggml_status (*g_cpu_compute)(ggml_backend_t, ggml_cgraph *);
ggml_backend_t (*g_cpu_init)(ggml_backend_dev_t, const char *);
ggml_status cpu_compute(ggml_backend_t b, ggml_cgraph * g) {
    if (b != g_queues.cpu) { LOCKED; g_queues.progress(); log_graph(-1, g); }
    return g_cpu_compute(b, g);
}
ggml_backend_t cpu_init(ggml_backend_dev_t d, const char * params) {
    ggml_backend_t b = g_cpu_init(d, params);
    if (b) { g_cpu_compute = b->iface.graph_compute; b->iface.graph_compute = cpu_compute; }
    return b;
}
void hook_cpu() {
    if (g_queues.cpu) return;
    g_cpu_init = cpu()->iface.init_backend;
    cpu()->iface.init_backend = cpu_init;
    g_queues.cpu = g_cpu_init(cpu(), nullptr);
    auto threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu()), "ggml_backend_set_n_threads");
    if (threads) threads(g_queues.cpu, atoi(setting("GGRAPH_RECORD_THREADS", "2")));
}

// ---------------------------------------------------------------- devices
int index_of(ggml_backend_dev_t d) { return (int) (d - g_device); }
const char * device_name(ggml_backend_dev_t d) { return g_names[index_of(d)][0]; }
const char * device_description(ggml_backend_dev_t) { return "a GPU played by ggraph record"; }
void device_memory(ggml_backend_dev_t, size_t * free, size_t * total) { *free = *total = 8ull << 30; }
enum ggml_backend_dev_type device_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }
void device_props(ggml_backend_dev_t d, ggml_backend_dev_props * p) {
    *p = {};
    p->name = device_name(d); p->description = device_description(d); p->type = device_type(d);
    device_memory(d, &p->memory_free, &p->memory_total);
    p->caps.async = true; p->caps.host_buffer = contract().pinned; p->caps.events = contract().events;
}
ggml_backend_t device_init(ggml_backend_dev_t d, const char *) {
    LOCKED;
    hook_cpu();
    Stream & s = g_queues.open(index_of(d));
    g_log.line("{\"t\":\"stream\",\"be\":%d,\"dev\":%d}", s.id, s.device);
    ggml_backend_i i = {};
    i.get_name = backend_name; i.free = backend_free; i.set_tensor_async = backend_set; i.get_tensor_async = backend_get;
    i.cpy_tensor_async = backend_copy; i.synchronize = backend_synchronize; i.graph_compute = backend_compute;
    if (contract().events) { i.event_record = backend_record; i.event_wait = backend_wait; }
    auto * b = new ggml_backend();
    b->guid = guid(); b->iface = i; b->device = d; b->context = &s;
    return b;
}
ggml_backend_buffer_type_t device_type_of_memory(ggml_backend_dev_t d) { return &g_type[index_of(d)][0]; }
ggml_backend_buffer_type_t device_type_of_host_memory(ggml_backend_dev_t d) { return contract().pinned ? &g_type[index_of(d)][1] : nullptr; }
bool device_supports_type(ggml_backend_dev_t d, ggml_backend_buffer_type_t t) { return t == &g_type[index_of(d)][0]; }
bool device_supports_op(ggml_backend_dev_t, const ggml_tensor * t) { return ggml_backend_dev_supports_op(cpu(), t); }
// Weights that lie in host memory: matrix products of many rows come here. CUDA takes other operations too.
bool device_offloads(ggml_backend_dev_t, const ggml_tensor * t) {
    int64_t rows = t->op == GGML_OP_MUL_MAT ? t->ne[1] : t->op == GGML_OP_MUL_MAT_ID ? t->ne[2] : 0;
    return rows >= 32;
}
ggml_backend_event_t event_new(ggml_backend_dev_t d) {
    LOCKED;
    auto * e = new ggml_backend_event;
    e->device = d; e->context = new EventPtr(new_event());
    return e;
}
void event_free(ggml_backend_dev_t, ggml_backend_event_t e) { LOCKED; delete (EventPtr *) e->context; delete e; }

// ---------------------------------------------------------------- registration
const char * registry_name(ggml_backend_reg_t) { return "sim"; }
size_t registry_count(ggml_backend_reg_t) { return g_devices; }
ggml_backend_dev_t registry_device(ggml_backend_reg_t, size_t i) { return &g_device[i]; }
void * registry_address(ggml_backend_reg_t, const char *) { return nullptr; }

void describe_device(int d, ggml_backend_reg_t registry) {
    for (int pinned = 0; pinned < 2; pinned++) {
        snprintf(g_names[d][pinned], sizeof g_names[d][pinned], pinned ? "sim%d_Host" : "sim%d", d);
        auto & t = g_type[d][pinned];
        t.iface = {};
        t.iface.get_name = type_name; t.iface.alloc_buffer = type_alloc; t.iface.get_alignment = type_alignment; t.iface.is_host = type_is_pinned;
        t.device = &g_device[d]; t.context = g_names[d][pinned];
    }
    auto & f = g_device[d].iface;
    f = {};
    f.get_name = device_name; f.get_description = device_description; f.get_memory = device_memory; f.get_type = device_type;
    f.get_props = device_props; f.init_backend = device_init; f.get_buffer_type = device_type_of_memory;
    f.get_host_buffer_type = device_type_of_host_memory; f.supports_op = device_supports_op; f.supports_buft = device_supports_type;
    f.offload_op = device_offloads;
    if (contract().events) { f.event_new = event_new; f.event_free = event_free; f.event_synchronize = event_synchronize; }
    g_device[d].reg = registry;
}
} // namespace

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    static ggml_backend_reg registry;
    static bool described = false;
    if (described) return &registry;
    described = true;
    registry.api_version = GGML_BACKEND_API_VERSION;
    registry.iface = { registry_name, registry_count, registry_device, registry_address };
    for (int d = 0; d < MOST_DEVICES; d++) describe_device(d, &registry);
    if (g_trap) trap::install();
    g_log.line("{\"t\":\"begin\",\"version\":1,\"devices\":%d,\"contract\":\"%s\",\"api\":%d}", g_devices, contract().name, GGML_BACKEND_API_VERSION);
    return &registry;
}

// Loaded before the program (LD_PRELOAD) or by its Python: nobody calls ggml_backend_load. The last
// variable of the file, so that everything above is ready.
[[maybe_unused]] static const bool g_registered = [] {
    bool wanted = atoi(setting("GGRAPH_RECORD_REGISTER", "0"));
    if (wanted) ggml_backend_register(ggml_backend_init());
    return wanted;
}();
