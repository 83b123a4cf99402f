//! Runs the keeper of shared memory in this process.
//!
//! Standard input is the line to the pager, and standard output the socket where programs ask.

use crate::evict::{Evictor, Orders};
use crate::line::{self, Order, Receiver, Report, Start};
use crate::open::Place;
use crate::record::Record;
use crate::serve;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;

/// A file system that is mounted.
#[derive(Debug)]
pub struct Mounted {
    /// Its root.
    pub root: OwnedFd,
    /// Major and minor number of its disk.
    pub device: [u32; 2],
}

/// Why a keeper ends with an error.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// It was not started by a pager.
    #[error("this command is started by a pager, with a socket to it as standard input")]
    NotStarted,
    /// The record or the file system cannot be used.
    #[error("shared memory cannot be kept")]
    Io(#[from] io::Error),
}

/// Serves until the pager is gone. `set_up` mounts the file system; its
/// error is told to the pager, which tells programs.
///
/// # Errors
/// See [`KeeperError`].
pub fn run(set_up: impl FnOnce(&Start) -> Result<Mounted, String>) -> Result<(), KeeperError> {
    let line = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let listener = io::stdout().as_fd().try_clone_to_owned()?;
    let mut receiver = Receiver::new(line.try_clone()?);
    let Ok(Some(Order::Start(start))) = receiver.receive() else {
        return Err(KeeperError::NotStarted);
    };
    // Each program's own mask is in the mode that it sends.
    rustix::process::umask(rustix::fs::Mode::empty());
    let mounted = match set_up(&start) {
        Ok(mounted) => mounted,
        Err(reason) => return Ok(line::send(&line, &Report::Refused(reason))?),
    };
    let record = Record::open(&start.record)?;
    let place = Arc::new(Place::new(mounted.root.as_fd(), record).map_err(io::Error::from)?);
    line::send(&line, &Report::Ready(mounted.device))?;
    let orders = Arc::new(Orders::new(start.limit_bytes));
    let evictor = Evictor {
        place: Arc::clone(&place),
        orders: Arc::clone(&orders),
        line,
        device: mounted.device,
    };
    thread::Builder::new().name("evictor".into()).spawn(move || evictor.run())?;
    thread::Builder::new().name("serve".into()).spawn(move || serve::run(&listener, &place))?;
    loop {
        match receiver.receive() {
            Ok(Some(Order::Limit(bytes))) => orders.set_limit(bytes),
            Ok(Some(Order::Unmapped(number))) => orders.unmapped(number),
            Ok(Some(Order::Start(_))) => {}
            Ok(None) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}
