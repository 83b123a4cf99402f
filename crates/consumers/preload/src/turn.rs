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
//! An act that may not meet the others' events fails if these are not read in time: the helper
//! would take a page that has come to an address for the page that was there. A fork goes on,
//! because the pager reads all events before it lets the fork happen.
//!
//! A signal handler may make such a call in the middle of another, and would wait for its own
//! thread. So a thread blocks its signals during an act, but for those that the kernel sends for
//! what the thread itself does.

use crate::{own, sys};
use hecaton_uffd::Errno;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// How long a fork, or the helper, waits for the others. While a pager reads events, the others are
/// over in microseconds.
const PATIENCE_MS: u64 = 100;
/// The same for a fork that must not begin while the helper takes pages, and in a program whose
/// system calls are filtered.
const LONG_PATIENCE_MS: u64 = 2000;
/// The same for acts that fail then: the pager may have been killed, and its successor comes.
const LONGEST_PATIENCE_MS: u64 = 20_000;

/// Threads that are changing mappings and need not be alone.
#[unsafe(link_section = ".data")]
static TOGETHER: AtomicU32 = AtomicU32::new(0);
/// The act that is alone: 0, or an [`Act`].
#[unsafe(link_section = ".data")]
static ALONE: AtomicU32 = AtomicU32::new(0);

/// Signals that wait while an act is alone. The kernel kills a program if it must send one of the
/// others while the thread blocks it.
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

/// Held while mappings are changed together with others.
pub(crate) struct Together {
    mask: Mask,
}

impl Together {
    pub(crate) fn new() -> Together {
        loop {
            let held = Together::add(Mask::block_unless_filtered());
            let act = ALONE.load(SeqCst);
            if act == 0 {
                return held;
            }
            drop(held);
            sys::wait_while(&ALONE, act, 1000);
        }
    }

    /// For the helper, which must not wait and conflicts with forks only: `None` during a fork.
    pub(crate) fn unless_forking() -> Option<Together> {
        let held = Together::add(Mask(None));
        let act = ALONE.load(SeqCst);
        (act != Act::Fork as u32 && act != Act::LocalFork as u32).then_some(held)
    }

    /// For the helper before it takes pages: `None` while all pages must stay.
    pub(crate) fn unless_pages_stay() -> Option<Together> {
        let held = Together::add(Mask(None));
        let act = ALONE.load(SeqCst);
        (act != Act::LocalFork as u32 && act != Act::Replace as u32).then_some(held)
    }

    fn add(mask: Mask) -> Together {
        TOGETHER.fetch_add(1, SeqCst);
        Together { mask }
    }
}

impl Drop for Together {
    fn drop(&mut self) {
        if TOGETHER.fetch_sub(1, SeqCst) == 1 && ALONE.load(SeqCst) != 0 {
            sys::wake_all(&TOGETHER);
        }
        self.mask.restore();
    }
}

/// A thread's signal mask of before an act. None if its signals were not blocked.
#[derive(Clone, Copy)]
struct Mask(Option<u64>);

impl Mask {
    /// Blocks the calling thread's signals.
    fn block() -> Mask {
        Mask(sys::block_signals(MAY_WAIT))
    }

    /// The same, unless system calls are filtered: what a filter refuses may be deadly to try, and
    /// a program may do no more than get memory and give it back.
    fn block_unless_filtered() -> Mask {
        if own::is_filtered() { Mask(None) } else { Mask::block() }
    }

    fn restore(self) {
        if let Mask(Some(mask)) = self {
            sys::set_signal_mask(mask);
        }
    }
}

/// Held while no other thread changes mappings.
pub(crate) struct Alone {
    mask: Mask,
}

impl Alone {
    /// Fails with ENOMEM, which all calls of this kind know, if the others take too long.
    pub(crate) fn new(act: Act) -> Result<Alone, Errno> {
        let held = Alone::after_another(act);
        if own::is_filtered() {
            // A handler may have jumped out of an act, which is never over then.
            wait_for_others(LONG_PATIENCE_MS);
            return Ok(held);
        }
        if wait_for_others(LONGEST_PATIENCE_MS) { Ok(held) } else { Err(Errno(libc::ENOMEM)) }
    }

    /// For a fork, which goes on beside others that take long.
    pub(crate) fn for_fork() -> Alone {
        let held = Alone::after_another(Act::Fork);
        wait_for_others(PATIENCE_MS);
        held
    }

    fn after_another(act: Act) -> Alone {
        loop {
            match Alone::at_once(act) {
                Ok(held) => return held,
                Err(other) => sys::wait_while(&ALONE, other, 1000),
            }
        }
    }

    /// An error is the act that is under way.
    fn at_once(act: Act) -> Result<Alone, u32> {
        let mask = Mask::block();
        let begun = ALONE.compare_exchange(0, act as u32, SeqCst, SeqCst);
        begun.inspect_err(|_| mask.restore()).map(|_| Alone { mask })
    }

    /// For a caller that must not wait for another act, and must be certain to be alone.
    pub(crate) fn try_new(act: Act) -> Option<Alone> {
        let held = Alone::at_once(act).ok()?;
        wait_for_others(PATIENCE_MS).then_some(held)
    }
}

/// False if the others take longer than `patience_ms`. Time in which the whole process stood still
/// does not count.
fn wait_for_others(patience_ms: u64) -> bool {
    const LONGEST_LOOK_MS: u64 = 10;
    let (mut waited, mut looked_at) = (0, sys::now_ms());
    loop {
        match TOGETHER.load(SeqCst) {
            0 => return true,
            _ if waited >= patience_ms => return false,
            others => sys::wait_while(&TOGETHER, others, 1),
        }
        let now = sys::now_ms();
        waited += now.saturating_sub(looked_at).min(LONGEST_LOOK_MS);
        looked_at = now;
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        release();
        self.mask.restore();
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
    wait_for_others(LONG_PATIENCE_MS)
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
                let alone = Alone::new(Act::Other).expect("nobody is there");
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
        let fork = Alone::for_fork();
        assert!(Together::unless_forking().is_none());
        assert!(Together::unless_pages_stay().is_some());
        assert!(keep_pages());
        assert!(Together::unless_forking().is_none() && Together::unless_pages_stay().is_none());
        drop(fork);
        let replace = Alone::new(Act::Replace).expect("nobody is there");
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
        let alone = Alone::new(Act::Other).expect("nobody is there");
        // SAFETY: there is a handler for it.
        unsafe { libc::raise(libc::SIGUSR1) };
        assert!(!HANDLED.load(SeqCst));
        drop(alone);
        assert!(HANDLED.load(SeqCst));
    }
}
