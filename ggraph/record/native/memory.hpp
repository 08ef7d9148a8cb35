// Memory that the host and a device share, and every touch of it by the host while it is in flight.
//
// Pinned memory is mapped twice. The program has one view, the played devices the other, so the
// program's view can be protected for exactly as long as a copy is in flight, that is: enqueued, and
// not yet known to the host to be complete. A touch then faults. The handler logs the address and
// the stack, opens the page for this one instruction (x86's trap flag), and closes it again.
// Pageable memory has one view; only pages that lie wholly in a destination are protected, and the
// devices write there through /proc/self/mem, which protection does not stop.
#pragma once

#include "log.hpp"
#include "operand.hpp"

#include <algorithm>
#include <dlfcn.h>
#include <execinfo.h>
#include <map>
#include <mutex>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

inline std::recursive_mutex g_mutex;

constexpr uintptr_t PAGE = 4096;
constexpr int MOST_TOUCHES = 64; // logged of one copy in flight: enough to name the culprit
constexpr int DEEPEST = 12;      // frames of a stack that are logged

struct Mapping { uintptr_t host, device; size_t nbytes; }; // the two views of a pinned buffer

// Bytes [start, stop) that command `at` of `stream` will read, or write.
struct Flight { int stream; uint64_t at; uintptr_t start, stop; bool write, pinned; int touches; };

class SharedMemory {
  public:
    bool armed = false; // not while a model is loaded: read(2) into a protected page fails

    // Pinned memory of `nbytes`; the program's view of it.
    void * pin(size_t nbytes) {
        int fd = memfd_create("ggraph-pinned", MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, (off_t) nbytes) != 0) return nullptr;
        void * host = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        void * device = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (host == MAP_FAILED || device == MAP_FAILED) return nullptr;
        pinned_[(uintptr_t) host] = { (uintptr_t) host, (uintptr_t) device, nbytes };
        return host;
    }
    void unpin(void * host) {
        auto it = pinned_.find((uintptr_t) host);
        munmap((void *) it->second.host, it->second.nbytes);
        munmap((void *) it->second.device, it->second.nbytes);
        pinned_.erase(it);
    }
    const Mapping * mapping(const void * p) const {
        auto it = pinned_.upper_bound((uintptr_t) p);
        if (it == pinned_.begin()) return nullptr;
        --it;
        return (uintptr_t) p < it->second.host + it->second.nbytes ? &it->second : nullptr;
    }

    // A move of bytes by a device: protection does not concern it.
    void move(void * to, const void * from, size_t n) {
        void * dst = device_view(to);
        const void * src = device_view(from);
        if (closed(dst, n)) {
            if (pwrite(mem(), src, n, (off_t) (uintptr_t) dst) != (ssize_t) n) g_log.line("{\"t\":\"lost\",\"at\":%llu,\"n\":%zu}", number(to), n);
        } else {
            memmove(dst, src, n);
        }
    }
    void fill(void * to, int byte, size_t n) {
        if (!closed(device_view(to), n)) { memset(device_view(to), byte, n); return; }
        std::vector<char> bytes(n, (char) byte);
        move(to, bytes.data(), n);
    }

    // New memory lies at `p`: what is in flight to there was given back by the program.
    void replaced(const void * p, size_t n) {
        uintptr_t start = (uintptr_t) p, stop = start + n;
        for (auto & f : flights_)
            if (!f.pinned && f.start < stop && start < f.stop)
                g_log.line("{\"t\":\"lost\",\"at\":%llu,\"n\":%zu}", (unsigned long long) std::max(f.start, start), (size_t) (std::min(f.stop, stop) - std::max(f.start, start)));
    }
    void take_off(Flight f) {
        f.pinned = mapping((void *) f.start) != nullptr;
        f.touches = 0;
        flights_.push_back(f);
        protect(f.start, f.stop, f.pinned);
    }
    // The host now knows that `complete` commands of `stream` are complete.
    void land(int stream, uint64_t complete) {
        std::vector<Flight> landed;
        auto gone = [&](const Flight & f) { return f.stream == stream && f.at < complete; };
        std::copy_if(flights_.begin(), flights_.end(), std::back_inserter(landed), gone);
        flights_.erase(std::remove_if(flights_.begin(), flights_.end(), gone), flights_.end());
        for (auto & f : landed) protect(f.start, f.stop, f.pinned);
    }

    // A fault at `p`. Whether it is ours, and then the page has been opened for one instruction.
    bool touched(void * p, bool write, ucontext_t * context);
    void stepped(ucontext_t * context);

  private:
    void * device_view(const void * p) const {
        const Mapping * m = mapping(p);
        return m ? (void *) (m->device + ((uintptr_t) p - m->host)) : (void *) p;
    }
    // Whether bytes of pageable memory are protected at present.
    bool closed(const void * p, size_t n) const {
        return std::any_of(flights_.begin(), flights_.end(), [&](const Flight & f) {
            return !f.pinned && f.start < (uintptr_t) p + n && (uintptr_t) p < f.stop;
        });
    }
    static int mem() { static int fd = open("/proc/self/mem", O_RDWR | O_CLOEXEC); return fd; }

    // Each page of [start, stop) as strict as the strictest of what is in flight there.
    void protect(uintptr_t start, uintptr_t stop, bool pinned) {
        if (!armed) return;
        uintptr_t first = pinned ? start / PAGE : (start + PAGE - 1) / PAGE, last = pinned ? (stop + PAGE - 1) / PAGE : stop / PAGE;
        for (uintptr_t page = first; page < last;) { // neighbours with equal rights in one call
            int rights = allowed(page);
            uintptr_t next = page + 1;
            while (next < last && allowed(next) == rights) next++;
            mprotect((void *) (page * PAGE), (next - page) * PAGE, rights);
            page = next;
        }
    }
    int allowed(uintptr_t page) const {
        int rights = PROT_READ | PROT_WRITE;
        for (auto & f : flights_) {
            bool whole = f.start <= page * PAGE && (page + 1) * PAGE <= f.stop;
            if (f.touches >= MOST_TOUCHES || !(f.pinned ? f.start < (page + 1) * PAGE && page * PAGE < f.stop : whole)) continue;
            if (f.write) return PROT_NONE;
            rights = PROT_READ;
        }
        return rights;
    }

    std::map<uintptr_t, Mapping> pinned_;
    std::vector<Flight> flights_;
};

inline SharedMemory g_memory;

namespace trap {
inline struct sigaction old_segv, old_trap;
inline thread_local std::vector<uintptr_t> opened; // pages, while one instruction runs

// The frames above the handler: ours come first, then the kernel's trampoline, then the culprit.
inline std::string stack() {
    void * frames[DEEPEST + 6];
    int n = backtrace(frames, DEEPEST + 6), first = 0;
    Dl_info ours = {}, info = {};
    dladdr((void *) &g_log, &ours);
    while (first < n && dladdr(frames[first], &info) && info.dli_fbase == ours.dli_fbase) first++;
    std::string out;
    for (int i = first + 1; i < n; i++) {
        if (!dladdr(frames[i], &info) || !info.dli_fname) continue;
        const char * file = strrchr(info.dli_fname, '/');
        char where[64];
        snprintf(where, sizeof where, "+0x%llx", number(frames[i]) - number(info.dli_saddr ? info.dli_saddr : info.dli_fbase));
        out += (out.empty() ? "\"" : ",\"") + plain(file ? file + 1 : info.dli_fname) + " " + plain(info.dli_sname ? info.dli_sname : "?") + where + "\"";
    }
    return out;
}
inline void on_segv(int, siginfo_t * info, void * context) {
    bool write = false;
#ifdef __x86_64__
    write = ((ucontext_t *) context)->uc_mcontext.gregs[REG_ERR] & 2;
#endif
    if (!g_memory.touched(info->si_addr, write, (ucontext_t *) context)) sigaction(SIGSEGV, &old_segv, nullptr); // faults again, and is theirs
}
inline void on_trap(int, siginfo_t *, void * context) {
    if (opened.empty()) { sigaction(SIGTRAP, &old_trap, nullptr); return; }
    g_memory.stepped((ucontext_t *) context);
}
inline void install() {
    void * warm[2];
    backtrace(warm, 2); // loads what it needs, so that the handler loads nothing
    struct sigaction action = {};
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    action.sa_sigaction = on_segv;
    sigaction(SIGSEGV, &action, &old_segv);
    action.sa_sigaction = on_trap;
    sigaction(SIGTRAP, &action, &old_trap);
}
} // namespace trap

inline bool SharedMemory::touched(void * p, bool write, ucontext_t * context) {
    std::lock_guard<std::recursive_mutex> lock(g_mutex);
    uintptr_t at = (uintptr_t) p, page = at / PAGE, end = at + WIDEST;
#ifdef __x86_64__
    end = at + operand_bytes((void *) context->uc_mcontext.gregs[REG_RIP]);
#endif
    bool ours = false;
    for (auto & f : flights_) {
        bool page_hit = f.start < (page + 1) * PAGE && page * PAGE < f.stop;
        ours |= page_hit;
        if (end <= f.start || at >= f.stop || !(f.write || write)) continue; // a neighbour on the page
        if (f.touches++ >= MOST_TOUCHES) continue;
        g_log.line("{\"t\":\"host\",\"what\":\"touch\",\"%s\":[%llu,1],\"stack\":[%s]}", write ? "w" : "r", (unsigned long long) std::max(at, f.start), f.touches == 1 ? trap::stack().c_str() : "");
    }
    if (!ours) return false;
    mprotect((void *) (page * PAGE), PAGE, PROT_READ | PROT_WRITE);
#ifdef __x86_64__
    context->uc_mcontext.gregs[REG_EFL] |= 0x100; // stop after this instruction
    trap::opened.push_back(page);
#else
    (void) context; // the page stays open: its later touches are not seen
#endif
    return true;
}
inline void SharedMemory::stepped(ucontext_t * context) {
    std::lock_guard<std::recursive_mutex> lock(g_mutex);
    for (uintptr_t page : trap::opened) mprotect((void *) (page * PAGE), PAGE, allowed(page));
    trap::opened.clear();
#ifdef __x86_64__
    context->uc_mcontext.gregs[REG_EFL] &= ~0x100ll;
#endif
}
