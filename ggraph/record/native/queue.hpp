// Streams that execute late: what is enqueued waits until the order that is played lets it run, or
// until the host waits for it. Every order that can come out is one that a device may choose.
//
// Orders (GGRAPH_RECORD_ORDER):
//   eager           everything runs as soon as it can
//   lazy            nothing runs before the host waits for it
//   late:D          device D is lazy, the others eager
//   random:SEED     a random part runs at every call
//   hold:S.I        stream S stops before its command I until the host waits for that
//   hold:S.I:T.J    ... or until command J of stream T has run
#pragma once

#include "memory.hpp"

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <deque>
#include <memory>
#include <random>

using Clock = std::vector<uint64_t>; // per stream: how many of its commands are complete

inline void join(Clock & into, const Clock & other) {
    if (into.size() < other.size()) into.resize(other.size());
    for (size_t i = 0; i < other.size(); i++) into[i] = std::max(into[i], other[i]);
}

struct Event {
    int id = -1;
    uint64_t recorded = 0, done = 0; // how often; event `n` is done when `done >= n`
    int stream = -1;                 // where it was recorded last
    Clock clock;                     // what is complete when the latest record is
};
using EventPtr = std::shared_ptr<Event>;
using Tensors = std::vector<std::unique_ptr<ggml_tensor>>; // as they were when they were enqueued

struct Command {
    enum Kind { KERNEL, COPY, RECORD, WAIT } kind;
    ggml_tensor * node = nullptr;
    std::shared_ptr<Tensors> tensors;
    void * dst = nullptr;
    const void * src = nullptr;
    size_t nbytes = 0;
    std::vector<char> staged; // a copy's source that was taken at the call
    EventPtr event;
    uint64_t version = 0;
    bool begun = false;
    bool result = false; // goes to the host: its sum is logged when it has run
};

struct Stream {
    int id, device;
    uint64_t enqueued = 0, done = 0;
    Clock clock; // what is complete when its last command is
    std::deque<Command> queue;
    bool alive = true;
};

struct Order {
    enum Kind { EAGER, LAZY, LATE, RANDOM, HOLD } kind = EAGER;
    int device = -1, held = -1, until = -1;
    unsigned long long held_at = 0, until_at = 0;
    std::mt19937 random;

    explicit Order(const char * text) {
        unsigned seed;
        if (!strcmp(text, "eager")) return;
        if (!strcmp(text, "lazy")) { kind = LAZY; return; }
        if (sscanf(text, "late:%d", &device) == 1) { kind = LATE; return; }
        if (sscanf(text, "random:%u", &seed) == 1) { kind = RANDOM; random.seed(seed); return; }
        if (sscanf(text, "hold:%d.%llu:%d.%llu", &held, &held_at, &until, &until_at) >= 2) { kind = HOLD; return; }
        fprintf(stderr, "ggraph: GGRAPH_RECORD_ORDER=%s is no order\n", text);
        abort();
    }
};

class Queues {
  public:
    std::vector<std::unique_ptr<Stream>> streams;
    ggml_backend_t cpu = nullptr; // computes the kernels

    Stream & open(int device) {
        streams.emplace_back(new Stream { (int) streams.size(), device, 0, 0, {}, {}, true });
        return *streams.back();
    }
    // Returns the command's place in its stream, which the log's reader counts for itself.
    uint64_t push(Stream & s, Command c) {
        if (c.kind == Command::WAIT) join(s.clock, c.event->clock);
        if (s.clock.size() <= (size_t) s.id) s.clock.resize(s.id + 1);
        s.clock[s.id] = ++s.enqueued;
        if (c.kind == Command::RECORD) c.event->clock = s.clock;
        s.queue.push_back(std::move(c));
        if (s.queue.size() == 1) begin(s);
        return s.enqueued - 1;
    }
    void record(Stream & s, const EventPtr & e) {
        Command c { Command::RECORD };
        c.event = e; c.version = ++e->recorded; e->stream = s.id;
        push(s, std::move(c));
    }
    void wait(Stream & s, const EventPtr & e) { // for the latest record; none: at once
        Command c { Command::WAIT };
        c.event = e; c.version = e->recorded;
        push(s, std::move(c));
    }
    // The host waits: these run it, and the host then knows more to be complete.
    void finish(Stream & s) { run_until(s, s.enqueued); learn(s.clock); }
    void finish(const EventPtr & e) { reach(e, e->recorded); learn(e->clock); }

    // Whether a command that has not run yet touches any of these bytes.
    bool will_touch(const void * base, size_t n) const {
        auto meets = [&](const void * p, size_t k) { return p && (const char *) p < (const char *) base + n && (const char *) base < (const char *) p + k; };
        for (auto & s : streams)
            for (auto & c : s->queue) {
                if (c.kind == Command::COPY && (meets(c.dst, c.nbytes) || (c.staged.empty() && meets(c.src, c.nbytes)))) return true;
                if (c.kind != Command::KERNEL) continue;
                if (meets(c.node->data, ggml_nbytes(c.node))) return true;
                for (auto * x : c.node->src) if (x && meets(x->data, ggml_nbytes(x))) return true;
            }
        return false;
    }

    // What the order lets run on its own, at every call of the program.
    void progress() {
        if (order_.kind == Order::LAZY) return;
        if (order_.kind == Order::RANDOM) return progress_randomly();
        for (bool any = true; any;) {
            any = false;
            for (auto & s : streams) while (s->device != order_.device && can_run(*s) && !held(*s)) { step(*s, batch_of(*s)); any = true; }
        }
    }

  private:
    Order order_ { setting("GGRAPH_RECORD_ORDER", "eager") };
    bool poison_ = atoi(setting("GGRAPH_RECORD_POISON", "0"));
    bool released_ = false;
    static constexpr size_t BATCH = 256; // kernels given to the CPU backend at once

    void learn(const Clock & clock) { for (size_t i = 0; i < clock.size(); i++) g_memory.land((int) i, clock[i]); }
    bool can_run(const Stream & s) const {
        return !s.queue.empty() && (s.queue.front().kind != Command::WAIT || s.queue.front().event->done >= s.queue.front().version);
    }
    bool held(const Stream & s) {
        if (order_.kind != Order::HOLD || released_ || s.id != order_.held || s.done != order_.held_at) return false;
        released_ = order_.until >= 0 && (size_t) order_.until < streams.size() && streams[order_.until]->done > order_.until_at;
        if (released_) g_log.line("{\"t\":\"forced\"}");
        return !released_;
    }
    // Kernels may run together, but not past one at which an order stops.
    size_t batch_of(const Stream & s) const {
        size_t n = BATCH;
        if (order_.kind != Order::HOLD) return n;
        if (s.id == order_.held && s.done < order_.held_at) n = std::min<size_t>(n, order_.held_at - s.done);
        if (s.id == order_.until && s.done <= order_.until_at) n = std::min<size_t>(n, order_.until_at - s.done + 1);
        return n;
    }
    void progress_randomly() {
        unsigned most = order_.random() % 4 == 0 ? 400 : 3;
        for (unsigned k = order_.random() % most; k > 0 && !streams.empty(); k--) {
            Stream & s = *streams[order_.random() % streams.size()];
            if (can_run(s)) step(s, 1);
        }
    }
    // Runs `s` until `count` of its commands are done, and what they wait for on other streams.
    void run_until(Stream & s, uint64_t count) {
        while (s.done < count && !s.queue.empty()) {
            Command & c = s.queue.front();
            if (c.kind == Command::WAIT && c.event->done < c.version) reach(EventPtr(c.event), c.version);
            step(s, std::min<size_t>(count - s.done, batch_of(s)));
        }
    }
    void reach(const EventPtr & e, uint64_t version) {
        while (e->done < version) {
            Stream * s = recorder(e, version);
            if (!s || s->queue.empty()) { e->done = version; return; } // its stream was closed
            Command & c = s->queue.front();
            if (c.kind == Command::WAIT && c.event->done < c.version) reach(EventPtr(c.event), c.version);
            step(*s, batch_of(*s));
        }
    }
    Stream * recorder(const EventPtr & e, uint64_t version) {
        for (auto & s : streams)
            for (auto & c : s->queue) if (c.kind == Command::RECORD && c.event == e && c.version == version) return s.get();
        return nullptr;
    }

    // The head of the queue has begun and is not done: what it will write is garbage meanwhile.
    void begin(Stream & s) {
        if (!poison_ || s.queue.empty() || s.queue.front().begun) return;
        Command & c = s.queue.front();
        c.begun = true;
        if (c.kind == Command::COPY && c.dst != c.src) g_memory.fill(c.dst, 0xff, c.nbytes);
        if (c.kind == Command::KERNEL && !c.node->view_src && ggml_is_contiguous(c.node) && !in_place(c.node))
            memset(c.node->data, c.node->type == GGML_TYPE_F32 ? 0xff : 0x7f, ggml_nbytes(c.node)); // NaN, or huge
    }
    static bool in_place(const ggml_tensor * t) {
        const char * from = (const char *) t->data, * to = from + ggml_nbytes(t);
        for (auto * x : t->src)
            if (x && from < (const char *) x->data + ggml_nbytes(x) && (const char *) x->data < to) return true;
        return false;
    }
    void step(Stream & s, size_t most_kernels) {
        if (s.queue.front().kind == Command::KERNEL) {
            std::vector<Command> kernels;
            while (!s.queue.empty() && s.queue.front().kind == Command::KERNEL && kernels.size() < most_kernels) {
                kernels.push_back(std::move(s.queue.front()));
                s.queue.pop_front();
            }
            compute(kernels);
            s.done += kernels.size();
        } else {
            Command c = std::move(s.queue.front());
            s.queue.pop_front();
            if (c.kind == Command::COPY) g_memory.move(c.dst, c.staged.empty() ? c.src : c.staged.data(), c.nbytes);
            if (c.result) g_log.line("{\"t\":\"sum\",\"be\":%d,\"at\":%llu,\"sum\":%llu}", s.id, (unsigned long long) s.done, sum(c.src, c.nbytes));
            if (c.kind == Command::RECORD) c.event->done = std::max(c.event->done, c.version);
            s.done++;
        }
        begin(s);
    }
    void compute(std::vector<Command> & kernels) {
        static ggml_context * context = [] {
            ggml_init_params params = { ggml_graph_overhead_custom(BATCH, false) + 4096, nullptr, true };
            return ggml_init(params);
        }();
        ggml_reset(context);
        ggml_cgraph * graph = ggml_new_graph_custom(context, BATCH, false);
        for (auto & c : kernels) ggml_graph_add_node(graph, c.node);
        cpu->iface.graph_compute(cpu, graph);
    }
};

inline Queues g_queues;
