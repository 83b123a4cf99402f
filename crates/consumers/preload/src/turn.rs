//! Serializes changes of the program's mappings for the pager.
//!
//! The kernel queues the event of a change after the change. By then other threads may have made
//! and reported further changes, and the pager would take an address for another page's. So libc's
//! calls take turns. Each returns only when the pager has read its event. Until then:
//!
//! - `mmap`, `brk` and `munmap` need not be alone: in place of removed memory, only memory comes
//!   that the pager fills, and it fills none before it has read all events.
//! - `mremap`, and `mmap` of memory that is not paged (stacks), are alone: they bring pages to
//!   where others were. During `mremap` to a given place no page is taken: the helper knows pages
//!   by address.
//! - A fork is alone: its child has the mappings of before or after a change, and the pager must
//!   know which. See also [`crate::withhold`].
//! - The helper is alone while it drops pages, or pages are read, by their addresses: an address
//!   must mean the page that was claimed.
//!
//! A signal handler may make such a call in the middle of another, and would wait for itself. So an
//! act waits for the others at most [`PATIENCE_MS`] or [`LONG_PATIENCE_MS`], then goes on or fails.
//! Nobody goes on beside an act that is alone: signals wait until it is over.

use crate::sys;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// How long an act that must be alone waits for the others. While a pager reads events, the others
/// are over in microseconds.
const PATIENCE_MS: u64 = 100;
/// The same for acts that must not begin while the helper takes pages.
const LONG_PATIENCE_MS: u64 = 2000;

/// Threads that are changing mappings and need not be alone.
#[unsafe(link_section = ".data")]
static TOGETHER: AtomicU32 = AtomicU32::new(0);
/// The act that is alone: 0, or an [`Act`].
#[unsafe(link_section = ".data")]
static ALONE: AtomicU32 = AtomicU32::new(0);

/// Signals that wait while an act is alone: all but those that the kernel sends for what the thread
/// itself does. It kills a program that blocks these.
const MAY_WAIT: u64 = {
    let now =
        [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];
    let (mut signals, mut i) = (u64::MAX, 0);
    while i < now.len() {
        signals &= !(1 << (now[i] - 1));
        i += 1;
    }
    signals
};

/// An act that must be alone.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Act {
    Fork = 1,
    Other = 2,
    /// A fork whose child has no pager, and needs all pages.
    LocalFork = 3,
    /// Moved pages replace others.
    Replace = 4,
}

impl Act {
    /// Timeout of the wait for the others.
    const fn patience_ms(self) -> u64 {
        match self {
            Act::Fork | Act::Other => PATIENCE_MS,
            Act::LocalFork | Act::Replace => LONG_PATIENCE_MS,
        }
    }
}

/// Held while mappings are changed together with others.
pub(crate) struct Together(());

impl Together {
    pub(crate) fn new() -> Together {
        loop {
            let held = Together::add();
            let act = ALONE.load(SeqCst);
            if act == 0 {
                return held;
            }
            drop(held);
            sys::wait_while(&ALONE, act, 1000);
        }
    }

    /// For a caller that must not wait and conflicts with forks only: `None` during a fork.
    pub(crate) fn unless_forking() -> Option<Together> {
        let held = Together::add();
        let act = ALONE.load(SeqCst);
        (act != Act::Fork as u32 && act != Act::LocalFork as u32).then_some(held)
    }

    /// For the helper before it takes pages: `None` while all pages must stay.
    pub(crate) fn unless_pages_stay() -> Option<Together> {
        let held = Together::add();
        let act = ALONE.load(SeqCst);
        (act != Act::LocalFork as u32 && act != Act::Replace as u32).then_some(held)
    }

    fn add() -> Together {
        TOGETHER.fetch_add(1, SeqCst);
        Together(())
    }
}

impl Drop for Together {
    fn drop(&mut self) {
        if TOGETHER.fetch_sub(1, SeqCst) == 1 && ALONE.load(SeqCst) != 0 {
            sys::wake_all(&TOGETHER);
        }
    }
}

/// Held while no other thread changes mappings.
pub(crate) struct Alone {
    /// The thread's signal mask of before.
    mask: u64,
}

impl Alone {
    pub(crate) fn new(act: Act) -> Alone {
        let mask = sys::block_signals(MAY_WAIT);
        while let Err(other) = ALONE.compare_exchange(0, act as u32, SeqCst, SeqCst) {
            sys::wait_while(&ALONE, other, 1000);
        }
        let held = Alone { mask };
        wait_for_others(act.patience_ms());
        held
    }

    /// For a caller that must not wait for another act, and must be certain to be alone.
    pub(crate) fn try_new(act: Act) -> Option<Alone> {
        let mask = sys::block_signals(MAY_WAIT);
        if ALONE.compare_exchange(0, act as u32, SeqCst, SeqCst).is_err() {
            sys::set_signal_mask(mask);
            return None;
        }
        let held = Alone { mask };
        wait_for_others(act.patience_ms()).then_some(held)
    }
}

/// False if the others take longer than `patience_ms`.
fn wait_for_others(patience_ms: u64) -> bool {
    let until = sys::now_ms() + patience_ms;
    loop {
        match TOGETHER.load(SeqCst) {
            0 => return true,
            _ if sys::now_ms() >= until => return false,
            others => sys::wait_while(&TOGETHER, others, 1),
        }
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        release();
        sys::set_signal_mask(self.mask);
    }
}

fn release() {
    ALONE.store(0, SeqCst);
    sys::wake_all(&ALONE);
}

/// In a fork: the helper takes no page until the fork is over. False if the helper, or another
/// thread that changes mappings, takes too long.
pub(crate) fn keep_pages() -> bool {
    ALONE.store(Act::LocalFork as u32, SeqCst);
    wait_for_others(Act::LocalFork.patience_ms())
}

/// Ends a fork. Its [`Alone`] was forgotten, because a fork ends in two processes. The signal mask
/// stays as it is.
pub(crate) fn end_fork() {
    release();
}

/// Called in the child of a fork, which has no other threads.
pub(crate) fn forget_others() {
    TOGETHER.store(0, SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    /// One test, because there is one state for the whole process.
    #[test]
    fn who_is_alone_is_alone() {
        let shared = Together::new();
        let (another, waited) = (Together::new(), AtomicBool::new(false));
        drop(another);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let alone = Alone::new(Act::Other);
                assert!(waited.load(SeqCst));
                drop(alone);
            });
            while ALONE.load(SeqCst) == 0 {
                std::thread::yield_now();
            }
            assert!(Alone::try_new(Act::Other).is_none());
            waited.store(true, SeqCst);
            drop(shared);
        });

        let busy = Together::new();
        assert!(Alone::try_new(Act::Other).is_none(), "somebody takes too long");
        drop(busy);
        let alone = Alone::try_new(Act::Other).expect("nobody is there");
        assert!(Together::unless_forking().is_some());
        drop(alone);
        let fork = Alone::new(Act::Fork);
        assert!(Together::unless_forking().is_none());
        assert!(Together::unless_pages_stay().is_some());
        assert!(keep_pages());
        assert!(Together::unless_forking().is_none() && Together::unless_pages_stay().is_none());
        drop(fork);
        let replace = Alone::new(Act::Replace);
        assert!(Together::unless_forking().is_some() && Together::unless_pages_stay().is_none());
        drop(replace);
        assert_eq!((ALONE.load(SeqCst), TOGETHER.load(SeqCst)), (0, 0));
        a_handler_runs_when_the_act_is_over();
    }

    static HANDLED: AtomicBool = AtomicBool::new(false);

    extern "C" fn makes_a_mapping(_: libc::c_int) {
        HANDLED.store(true, SeqCst);
        drop(Together::new());
    }

    /// In the middle of the act it would wait for its own thread.
    fn a_handler_runs_when_the_act_is_over() {
        let handler: extern "C" fn(libc::c_int) = makes_a_mapping;
        // SAFETY: the handler calls what handlers may call.
        unsafe { libc::signal(libc::SIGUSR1, handler as libc::sighandler_t) };
        let alone = Alone::new(Act::Other);
        // SAFETY: there is a handler for it.
        unsafe { libc::raise(libc::SIGUSR1) };
        assert!(!HANDLED.load(SeqCst));
        drop(alone);
        assert!(HANDLED.load(SeqCst));
    }
}
