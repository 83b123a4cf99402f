//! A process serves a device: a new one, one whose process has died, or one that it has itself made
//! for it.

use super::abi::{control, state};
use super::control::{Control, DEPTH, UblkError};
use super::queue::Queue;
use super::size::Size;
use crate::attach::Role;
use crate::volume::Volume;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long the driver may take to know that the process before this one is dead.
const PATIENCE: Duration = Duration::from_secs(30);

/// Commands of the queue that are never given a request.
const SPARE: u16 = 16;

/// Between two attempts.
const POLL: Duration = Duration::from_millis(20);

/// A device that is served.
pub struct DiskServer {
    number: u32,
    control: Control,
    thread: JoinHandle<()>,
    _size: Arc<Size>,
}

impl DiskServer {
    /// Serves a device until it is stopped, given the way to the driver that its [`super::Disk`]
    /// has.
    pub fn serve(
        volume: Arc<Volume>,
        number: u32,
        driver: OwnedFd,
        role: Role,
    ) -> io::Result<DiskServer> {
        let control = Control::from_fd(driver);
        let of_thread = control.try_clone()?;
        let size = Arc::new(Size::new(Arc::clone(&volume), number, control.try_clone()?));
        volume.watch(&size);
        let of_device = Arc::clone(&size);
        let thread = thread::Builder::new().name("ublk-queue".into()).spawn(move || {
            let name = volume.name().to_owned();
            if let Err(error) = serve(volume, number, of_thread, role, of_device) {
                tracing::error!(volume = name, number, %error, "a block device cannot be served");
            }
        })?;
        Ok(DiskServer { number, control, thread, _size: size })
    }

    /// Ends the device: what is under way is answered, and what comes after that fails.
    pub fn stop(self) {
        if let Err(error) = self.control.stop(self.number) {
            tracing::warn!(number = self.number, %error, "a block device does not end");
            return;
        }
        // One that panicked has said so.
        let _ = self.thread.join();
    }
}

fn serve(
    volume: Arc<Volume>,
    number: u32,
    control: Control,
    role: Role,
    size: Arc<Size>,
) -> Result<(), UblkError> {
    let refused = |what| move |errno| UblkError::Refused { what, errno };
    let until = Instant::now() + PATIENCE;
    let start = loop {
        let info = control.info(number)?;
        let error = match info.state {
            state::DEAD => break control::START_DEV,
            state::QUIESCED => match control.begin_recovery(number) {
                Ok(()) => break control::END_USER_RECOVERY,
                // Not all of the one before is gone.
                Err(error @ UblkError::Refused { errno: Errno::BUSY, .. }) => error,
                Err(error) => return Err(error),
            },
            // The driver does not know yet that the one before is dead.
            _ => UblkError::Refused { what: "give up the process before", errno: Errno::BUSY },
        };
        if Instant::now() > until {
            return Err(error);
        }
        thread::sleep(POLL);
    };
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let device = open(format!("/dev/ublkc{number}"), flags, Mode::empty())
        .map_err(refused("open what a block device is served through"))?;
    let queue = Queue::open(device, Arc::clone(&volume), role).map_err(UblkError::Uring)?;
    // It returns when the queue is being served, which is this thread's to do.
    let starter = thread::Builder::new().name("ublk-start".into()).spawn(move || {
        if let Err(error) = control.start(start, number) {
            tracing::error!(volume = volume.name(), number, %error, "a block device does not start");
            // Its queue ends with that.
            let _ = control.stop(number);
            return;
        }
        if let Err(error) = leave_commands_waiting(number) {
            let volume = volume.name();
            tracing::warn!(volume, number, %error, "a block device may wait for ever when its process is killed");
        }
        size.started();
    });
    let _starter = starter.map_err(UblkError::Uring)?;
    queue.serve().map_err(UblkError::Uring)
}

/// Has the kernel ask for fewer requests at a time than the queue has tags for. The driver learns
/// of a process's death from commands that wait to be given a request, and with none of them it
/// would not (Linux before 6.16).
fn leave_commands_waiting(number: u32) -> io::Result<()> {
    let most = DEPTH - SPARE;
    std::fs::write(format!("/sys/block/ublkb{number}/queue/nr_requests"), most.to_string())
}
