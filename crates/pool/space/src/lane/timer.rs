//! The timer of a lane: a descriptor that becomes readable when something is due.

use crate::SpaceError;
use rustix::event::Timespec;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Times are those of the lane's clock.
pub(super) struct Timer {
    fd: OwnedFd,
    due: Option<Duration>,
}

impl Timer {
    pub(super) fn new() -> Result<Timer, SpaceError> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let fd = timerfd_create(TimerfdClockId::Monotonic, flags)
            .map_err(|error| SpaceError::Timer(error.into()))?;
        Ok(Timer { fd, due: None })
    }

    /// When it goes off, if it is set.
    pub(super) fn due(&self) -> Option<Duration> {
        self.due
    }

    /// Sets it to that time, or to `now` if that is later.
    pub(super) fn set(&mut self, at: Duration, now: Duration) {
        let at = at.max(now);
        // A time of zero would switch it off.
        let after = (at - now).max(Duration::from_nanos(1));
        let setting = Itimerspec { it_interval: Timespec::default(), it_value: timespec(after) };
        match timerfd_settime(&self.fd, TimerfdTimerFlags::empty(), &setting) {
            Ok(_) => self.due = Some(at),
            // The previous setting stays in force.
            Err(error) => {
                tracing::error!(error = %io::Error::from(error), "cannot set a lane's timer");
            }
        }
    }

    /// Whether it has gone off by now. Then it is not set any more.
    pub(super) fn has_gone_off(&mut self, now: Duration) -> bool {
        // By the clock it may be time, but the timer is what says so: were it left to go off later,
        // with nobody to read it, its descriptor would stay readable.
        let is_due = self.due.is_some_and(|due| due <= now);
        let has_gone_off = is_due && rustix::io::read(&self.fd, &mut [0; 8]).is_ok();
        if has_gone_off {
            self.due = None;
        }
        has_gone_off
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: duration.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}
