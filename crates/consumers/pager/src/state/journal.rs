//! Messages of the kernel, from the moment they are read until they are acted upon.
//!
//! A message is gone from the kernel once it is read: a page removed, a mapping moved, and nobody
//! else knows. So it is read straight into the state file. A pager that is killed between reading
//! and acting leaves it there, and its successor acts upon it first. A fault needs none of that
//! (waking the range has it delivered again), but comes the same way.

use hecaton_uffd::Uffd;
use hecaton_uffd::abi::UffdMsg;

/// Messages read at a time.
pub(crate) const DEPTH: usize = 16;

/// The place in the state file; one thread uses it.
pub(crate) struct Journal {
    /// Word 0: the address space plus one whose messages follow.
    space: *mut u64,
    messages: *mut UffdMsg,
}

impl Journal {
    pub(crate) const BYTES: usize = 32 + DEPTH * size_of::<UffdMsg>();

    pub(crate) fn at(memory: *mut u8) -> Journal {
        Journal { space: memory.cast(), messages: memory.wrapping_add(32).cast() }
    }

    /// Reads the messages of `uffd`, for `space`. Earlier messages must have been acted upon.
    pub(crate) fn fill(&self, space: usize, uffd: Uffd) -> Result<usize, hecaton_uffd::Errno> {
        // SAFETY: the memory is mapped for the life of the process, and only the thread that owns
        // the fault loop uses it. Volatile, because a successor reads it after a kill: the space
        // must be there before the kernel writes the first message.
        unsafe {
            self.space.write_volatile(space as u64 + 1);
            uffd.read(std::slice::from_raw_parts_mut(self.messages, DEPTH))
        }
    }

    /// The message at `index`, if it has not been marked done.
    pub(crate) fn message(&self, index: usize) -> Option<UffdMsg> {
        assert!(index < DEPTH);
        // SAFETY: as above, and the index is in range; any bytes are a valid message.
        let message = unsafe { self.messages.add(index).read_volatile() };
        (message.event != 0).then_some(message)
    }

    /// The message at `index` has been acted upon. Acting twice, after a kill between the act and
    /// this, must be harmless.
    pub(crate) fn done(&self, index: usize) {
        assert!(index < DEPTH);
        // SAFETY: as above.
        unsafe { (&raw mut (*self.messages.add(index)).event).write_volatile(0) };
    }

    /// The address space whose messages were read last: what a predecessor did not finish is its.
    pub(crate) fn last_read(&self) -> Option<usize> {
        // SAFETY: as above.
        let space = unsafe { self.space.read_volatile() };
        usize::try_from(space.checked_sub(1)?).ok()
    }
}
