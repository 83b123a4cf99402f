//! How long a borrower waits for a donor, without the time in which the borrower stood still.
//!
//! A process that was stopped, frozen or paused with its virtual machine finds at once that a
//! deadline is over, though the donor may have answered, or stood still on the same host. So a wait
//! consists of short ones, and none of them counts for much longer than it was to take.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// Into how many short ones a wait is divided.
const PARTS: u32 = 8;

/// No part is shorter.
const SHORTEST: Duration = Duration::from_millis(1);

/// How long a borrower waits, and what is left of that.
#[derive(Debug)]
pub struct Patience {
    limit: Duration,
    part: Duration,
    left: Duration,
}

impl Patience {
    /// For so long, of time in which this process runs.
    pub fn new(limit: Duration) -> Patience {
        Patience { limit, part: (limit / PARTS).max(SHORTEST), left: limit }
    }

    /// How long it was at first.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Whether nothing is left.
    pub fn is_over(&self) -> bool {
        self.left.is_zero()
    }

    /// Waits for the descriptor. No events mean that the time is over.
    pub(super) fn poll(&mut self, fd: BorrowedFd<'_>, events: PollFlags) -> io::Result<PollFlags> {
        loop {
            let wait = self.part.min(self.left);
            let began = Instant::now();
            let mut fds = [PollFd::new(&fd, events)];
            let outcome = poll(&mut fds, Timespec::try_from(wait).ok().as_ref());
            self.took(began.elapsed());
            match outcome {
                Ok(0) if wait.is_zero() => return Ok(PollFlags::empty()),
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(fds[0].revents()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// One part has taken so long.
    fn took(&mut self, elapsed: Duration) {
        self.left = self.left.saturating_sub(elapsed.min(2 * self.part));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_pause_counts_for_little() {
        let mut patience = Patience::new(Duration::from_secs(8));
        patience.took(Duration::from_secs(1));
        assert_eq!(patience.left, Duration::from_secs(7));
        patience.took(Duration::from_secs(3600));
        assert_eq!(patience.left, Duration::from_secs(5));
        (0..3).for_each(|_| patience.took(Duration::from_secs(2)));
        assert_eq!(patience.left, Duration::ZERO);
    }

    #[test]
    fn it_ends_when_nothing_comes_and_when_something_does() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut patience = Patience::new(Duration::from_millis(20));
        assert_eq!(patience.poll(ours.as_fd(), PollFlags::IN).unwrap(), PollFlags::empty());
        assert_eq!(patience.left, Duration::ZERO);
        io::Write::write_all(&mut &theirs, b"?").unwrap();
        assert_eq!(patience.poll(ours.as_fd(), PollFlags::IN).unwrap(), PollFlags::IN);
    }
}
