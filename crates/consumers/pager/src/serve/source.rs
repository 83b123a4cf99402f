//! Encodes the event sources of the fault loop for its epoll set.

use std::os::fd::RawFd;

/// Kind of a descriptor in the epoll set, with the index that goes with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Source {
    Listener,
    /// A connection that has not said [`hecaton_uffd::handover::Attach`] yet.
    Newcomer(RawFd),
    /// A program's userfaultfd.
    Faults(usize),
    /// The connection to a program's helper: readable by the evictor, watched here for its end.
    Helper(usize),
    /// The connection on which a hypervisor hands over guest RAM.
    Guest(usize),
    FirecrackerListener,
    /// A connection on which Firecracker has not sent its whole message yet.
    Firecracker(RawFd),
    /// The connection of a child that has not attached yet.
    Child(usize),
    /// Rung by other threads for a fork that had to wait, or an admitted connection.
    Bell,
    Demand,
    Prefetch,
}

impl Source {
    pub(crate) fn encode(self) -> u64 {
        let (kind, index) = match self {
            Source::Listener => (0, 0),
            Source::Newcomer(fd) => (1, fd as u64),
            Source::Faults(space) => (2, space as u64),
            Source::Helper(space) => (3, space as u64),
            Source::Demand => (4, 0),
            Source::Prefetch => (5, 0),
            Source::Child(space) => (6, space as u64),
            Source::Bell => (7, 0),
            Source::Guest(space) => (8, space as u64),
            Source::FirecrackerListener => (9, 0),
            Source::Firecracker(fd) => (10, fd as u64),
        };
        kind << 32 | index
    }

    pub(crate) fn decode(data: u64) -> Source {
        let index = data & u64::from(u32::MAX);
        match data >> 32 {
            0 => Source::Listener,
            1 => Source::Newcomer(index as RawFd),
            2 => Source::Faults(index as usize),
            3 => Source::Helper(index as usize),
            4 => Source::Demand,
            5 => Source::Prefetch,
            6 => Source::Child(index as usize),
            8 => Source::Guest(index as usize),
            9 => Source::FirecrackerListener,
            10 => Source::Firecracker(index as RawFd),
            _ => Source::Bell,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_source_is_known_again() {
        let large = u32::MAX as usize;
        let sources = [
            Source::Listener,
            Source::Newcomer(i32::MAX),
            Source::Faults(large),
            Source::Helper(1),
            Source::Guest(2),
            Source::FirecrackerListener,
            Source::Firecracker(3),
            Source::Child(4),
            Source::Bell,
            Source::Demand,
            Source::Prefetch,
        ];
        for source in sources {
            assert_eq!(Source::decode(source.encode()), source);
        }
    }
}
