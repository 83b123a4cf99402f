//! Shares the lock and the wake-up signals among the pager's threads.

use crate::core::Core;
use crate::state::sealing::Sealing;
use hecaton_memory::PAGE_SIZE;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// The lock, and the wake-up signals of the evictor, the fault loop and other threads.
pub(crate) struct Shared {
    core: Mutex<Core>,
    pub(crate) evict: Condvar,
    /// Wakes the thread that gives pages back to donors.
    pub(crate) give_back: Condvar,
    /// Signalled when [`Core::taking`] is over.
    pub(crate) taken: Condvar,
    pub(crate) bell: OwnedFd,
    admitted: Mutex<Vec<OwnedFd>>,
    /// Whether [`Core::detach`] is set. Read without the lock.
    pub(crate) detaching: AtomicBool,
    /// Seals pages before they leave, if the memory is encrypted.
    pub(crate) sealing: Option<Arc<Sealing>>,
}

impl Shared {
    pub(crate) fn new(core: Core, sealing: Option<Arc<Sealing>>) -> std::io::Result<Shared> {
        use rustix::event::{EventfdFlags, eventfd};
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let detaching = AtomicBool::new(false);
        Ok(Shared {
            core: Mutex::new(core),
            evict: Condvar::new(),
            give_back: Condvar::new(),
            taken: Condvar::new(),
            bell,
            admitted: Mutex::default(),
            detaching,
            sealing,
        })
    }

    /// Gives the fault loop a connection on which [`hecaton_uffd::handover::Attach`] is said next.
    pub(crate) fn admit(&self, socket: OwnedFd) {
        self.admitted.lock().expect("no thread panics here").push(socket);
        self.ring();
    }

    /// Takes the connections that [`Shared::admit`] was given.
    pub(crate) fn take_admitted(&self) -> Vec<OwnedFd> {
        std::mem::take(&mut *self.admitted.lock().expect("no thread panics here"))
    }

    /// Makes the fault loop check the waiting forks and the admitted connections.
    pub(crate) fn ring(&self) {
        // Fails only when the bell has been rung 2^64 times without a read.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// Contents of a staging slot that is taken or unwritten. They do not change until the slot's
    /// write has been acknowledged.
    pub(crate) fn slot_bytes(&self, slot: u32) -> &'static [u8] {
        let at = self.lock().state.slot(slot);
        // SAFETY: the staging memory is mapped for good, and the slot is as said.
        unsafe { std::slice::from_raw_parts(at, PAGE_SIZE) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Core> {
        // A thread that panics takes the process with it (see `worker`), so no lock is poisoned.
        self.core.lock().expect("the lock is never poisoned")
    }
}

/// The fault loop's epoll set, once it exists. A descriptor must be removed from the set before it
/// is closed. The kernel removes it only with a file's last descriptor, and the node has another.
#[derive(Default)]
pub(crate) struct EpollSet(pub(crate) Option<Arc<OwnedFd>>);

impl EpollSet {
    pub(crate) fn forget(&self, fd: RawFd) {
        if let Some(epoll) = &self.0 {
            // SAFETY: the descriptor is open. An error means that it was not watched yet.
            let _ = rustix::event::epoll::delete(epoll, unsafe { BorrowedFd::borrow_raw(fd) });
        }
    }
}
