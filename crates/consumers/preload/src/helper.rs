//! The helper thread: does for the pager what only a thread of the process may do.
//!
//! It is started with a bare `clone`, not `pthread_create`: glibc does not count it, so a program
//! whose threads have all ended still ends, and the thread needs no thread-local storage. It has a
//! descriptor table of its own with nothing in it but the pager's socket, the program's
//! userfaultfd and the area's, so the program may close every descriptor it has, and none of the
//! program's pipes stays open because of us.
//!
//! Once the last copy of the program's userfaultfd is closed, the kernel answers its faults with
//! zeros. So the helper has one, and before it lets go of that it ends the program.
//!
//! It must never touch memory that the pager pages: the pager may be waiting for it. For the same
//! reason a tracer that follows what the program starts does not get hold of it: the tracer may be
//! waiting for a page itself.

use crate::turn::{Act, Alone, Together};
use crate::{sys, withhold};
use hecaton_uffd::handover::{Answer, Command, MAGIC, MAX_RUNS, Op, Range, Reply, command_len};
use hecaton_uffd::sys::syscall;
use hecaton_uffd::{Errno, Uffd};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering};

/// Bytes of the helper's stack.
pub(crate) const STACK: usize = 64 << 10;

const PAGE: u64 = 4096;
const AREA: usize = MAX_RUNS * PAGE as usize;

/// What the thread is started with; lives on its own stack.
#[repr(C, align(16))]
struct Start {
    socket: RawFd,
    uffd: Uffd,
    mover: Option<Uffd>,
    area: u64,
    /// Set once the thread has let go of the program's descriptors.
    detached: AtomicU32,
}

/// Starts the helper and waits until it has closed its copies of the program's descriptors.
pub(crate) fn start(
    stack_top: usize,
    socket: RawFd,
    uffd: Uffd,
    mover: Option<Uffd>,
    area: u64,
) -> Result<(), Errno> {
    let at = (stack_top - size_of::<Start>()) & !63;
    let start = at as *mut Start;
    // SAFETY: the top of the helper's stack, which no thread uses yet.
    unsafe { start.write(Start { socket, uffd, mover, area, detached: AtomicU32::new(0) }) };
    let flags = libc::CLONE_VM
        | libc::CLONE_FS
        | libc::CLONE_SIGHAND
        | libc::CLONE_THREAD
        | libc::CLONE_SYSVSEM
        | libc::CLONE_UNTRACED;
    // SAFETY: all signals are blocked across the clone, so that the helper, which inherits the
    // mask, never runs a handler of the program's on its small stack.
    unsafe {
        let before = sys::set_signal_mask(u64::MAX);
        let cloned = libc::clone(entry, at as *mut libc::c_void, flags, start.cast());
        let failed = (cloned < 0).then(|| Errno(*libc::__errno_location()));
        sys::set_signal_mask(before);
        if let Some(errno) = failed {
            return Err(errno);
        }
        while (*start).detached.load(Ordering::Acquire) == 0 {
            let _ = syscall(libc::SYS_sched_yield, [0; 6]);
        }
    }
    Ok(())
}

extern "C" fn entry(start: *mut libc::c_void) -> libc::c_int {
    // SAFETY: `start` filled it and it stays on this thread's stack, above what is used.
    let start = unsafe { &*start.cast::<Start>() };
    keep_only([start.socket, start.uffd.0, start.mover.map_or(start.socket, |mover| mover.0)]);
    let name = c"hecaton".as_ptr() as usize;
    // SAFETY: the name is a C string.
    let _ = unsafe { syscall(libc::SYS_prctl, [libc::PR_SET_NAME as usize, name, 0, 0, 0, 0]) };
    start.detached.store(1, Ordering::Release);
    serve(start);
    // The pager is gone, and whoever might have started another. Each process that it served ends
    // itself here: its next fault would wait for good, and nobody else can name it without a risk
    // of meeting a process that was given its number since.
    sys::kill_own_process();
    0
}

fn keep_only(mut kept: [RawFd; 3]) {
    kept.sort_unstable();
    let close = |from: usize, to: usize| {
        if from <= to {
            // SAFETY: this thread's own table; the program's is another.
            let _ = unsafe { syscall(libc::SYS_close_range, [from, to, 0, 0, 0, 0]) };
        }
    };
    let mut next = 0;
    for fd in kept.map(|fd| fd as usize) {
        if next < fd {
            close(next, fd - 1);
        }
        next = fd + 1;
    }
    close(next, u32::MAX as usize);
}

fn serve(start: &Start) {
    let mut command = Command::new(Op::Barrier, 0);
    let mut reply = Reply { nonce: 0, done: [0; MAX_RUNS] };
    // Memory was to be withheld while a fork was under way, which must not lose it.
    let mut missed = false;
    // Until the next command that is answered.
    let mut held: Option<Alone> = None;
    loop {
        // SAFETY: any bytes are a valid Command; `op` is compared, never transmuted.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(
                std::ptr::from_mut(&mut command).cast::<u8>(),
                size_of::<Command>(),
            )
        };
        let Ok(read) = sys::read(start.socket, bytes) else { return };
        if command.op == MAGIC && read == size_of::<Answer>() {
            // A successor was not sure that its predecessor had said it.
            continue;
        }
        let count = command.count as usize;
        if read < command_len(0) || count > MAX_RUNS || read != command_len(count) {
            return;
        }
        let runs = &command.runs[..count];
        if command.op == Op::Clear as u32 {
            // If not, the next batch is not taken, either.
            clear(start.area);
            continue;
        }
        if command.op == Op::Withhold as u32 {
            match Together::unless_forking() {
                Some(_held) => runs.iter().for_each(|&run| withhold::withhold(run)),
                None => {
                    runs.iter().for_each(|&run| withhold::withhold_from_cores(run));
                    missed = true;
                }
            }
            continue;
        }
        // Before a page of it goes. A fork that is still under way does it itself when it is over.
        if missed && let Some(_held) = Together::unless_forking() {
            withhold::resume();
            missed = false;
        }
        if command.op == Op::Hold as u32 {
            held = held.or_else(|| Alone::try_new(Act::Other));
            reply.done[0] = held.is_some().into();
        } else if command.op == Op::Take as u32 {
            held = None;
            take(start, runs, &mut reply.done);
        } else if let (Some(_held), true) = (held.take(), command.op == Op::Drop as u32) {
            for (run, done) in runs.iter().zip(&mut reply.done) {
                // SAFETY: the pager has copied the pages and write-protected them.
                let dropped = unsafe { sys::dont_need(run.start as usize, run.len as usize) };
                *done = if dropped.is_ok() { (run.len / PAGE) as u32 } else { 0 };
            }
        } else {
            reply.done.fill(0);
        }
        reply.nonce = command.nonce;
        let length = size_of::<Reply>() - (MAX_RUNS - count) * size_of::<u32>();
        // SAFETY: a `repr(C)` structure of integers without padding.
        let bytes =
            unsafe { std::slice::from_raw_parts(std::ptr::from_ref(&reply).cast::<u8>(), length) };
        if sys::send(start.socket, bytes).is_err() {
            return;
        }
    }
}

/// Empties the area. False if that cannot be.
fn clear(area: u64) -> bool {
    // What a program locks (mlockall) locks the area, too.
    let advice = libc::MADV_DONTNEED_LOCKED as usize;
    // SAFETY: the pager has copied what it needs from the area before it says so.
    unsafe { sys::advise(area as usize, AREA, advice) }.is_ok()
}

/// Moves each run to the place in the area that its position among the pages gives it, moved or
/// not: so the pager knows where each page went without being told.
fn take(start: &Start, runs: &[Range], done: &mut [u32; MAX_RUNS]) {
    // Of a page in the area nobody could say when it came.
    let Some(mover) = start.mover.filter(|_| clear(start.area)) else { return done.fill(0) };
    let mut to = start.area;
    for (run, done) in runs.iter().zip(done) {
        *done = (mover.move_pages(to, run.start, run.len) / PAGE) as u32;
        to += run.len;
    }
}
