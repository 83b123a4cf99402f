//! The channel to the host: a virtio-serial port, or a Unix socket.
//!
//! The host may come and go; the port is opened again until it is there. The guest greets whoever
//! is at its other end, and learns what is so.

use hecaton_vm::guest_port::{GuestMessage, HostMessage, Lines, line};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

/// How soon a port is opened again that could not be, or has nobody at its other end.
const RETRY: Duration = Duration::from_secs(1);

/// The port, as far as it is open.
#[derive(Clone, Debug, Default)]
pub(crate) struct Port(Arc<Mutex<Option<Arc<File>>>>);

impl Port {
    /// Opens it, on a thread of its own that ends with the process: nothing ends a read of a device
    /// from outside. `hear` is told what the host says, and ends the thread by `false`.
    pub(crate) fn start(
        path: PathBuf,
        hear: impl Fn(HostMessage) -> bool + Send + 'static,
    ) -> io::Result<Port> {
        let port = Port::default();
        let thread = thread::Builder::new().name("host-port".into());
        thread.spawn({
            let port = port.clone();
            move || port.listen(&path, hear)
        })?;
        Ok(port)
    }

    /// Says something, if the host can take it at once: one that is not there greets later, and is
    /// told then.
    pub(crate) fn say(&self, message: &GuestMessage) {
        let Some(file) = self.open_file().clone() else { return };
        let mut fds = [PollFd::new(&*file, PollFlags::OUT)];
        let is_ready = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        let events = fds[0].revents();
        let is_ready = is_ready.is_ok() && events.contains(PollFlags::OUT);
        if !is_ready || events.contains(PollFlags::HUP) {
            return tracing::warn!(?message, "nobody takes it at the host's end");
        }
        if let Err(error) = (&*file).write_all(line(message).as_bytes()) {
            tracing::warn!(%error, ?message, "cannot be said to the host");
        }
    }

    fn open_file(&self) -> MutexGuard<'_, Option<Arc<File>>> {
        self.0.lock().expect("no thread panics with the port")
    }

    fn listen(&self, path: &Path, hear: impl Fn(HostMessage) -> bool) {
        let mut last_error = None;
        loop {
            match self.visit(path, &hear) {
                Ok(true) => last_error = None,
                Ok(false) => return,
                Err(error) => {
                    let error = error.to_string();
                    // Said once, and not each second.
                    if last_error.as_ref() != Some(&error) {
                        tracing::warn!(port = %path.display(), error, "the host cannot be heard");
                    }
                    last_error = Some(error);
                }
            }
            *self.open_file() = None;
            thread::sleep(RETRY);
        }
    }

    /// Greets the host and hears it until it goes; false if nobody wants to know any more.
    fn visit(&self, path: &Path, hear: &impl Fn(HostMessage) -> bool) -> io::Result<bool> {
        let file = Arc::new(open(path)?);
        // On a virtio-serial port this waits until somebody is there.
        (&*file).write_all(line(&GuestMessage::Hello).as_bytes())?;
        *self.open_file() = Some(Arc::clone(&file));
        let mut lines = Lines::default();
        let mut bytes = [0; 4096];
        loop {
            let count = (&*file).read(&mut bytes)?;
            if count == 0 {
                return Ok(true);
            }
            lines.take(&bytes[..count]);
            while let Some(message) = lines.next_message() {
                match message {
                    Ok(message) => {
                        if !hear(message) {
                            return Ok(false);
                        }
                    }
                    Err(error) => tracing::warn!(error, "the host says what is no message"),
                }
            }
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    match fs::metadata(path)?.file_type().is_socket() {
        true => Ok(File::from(OwnedFd::from(UnixStream::connect(path)?))),
        false => OpenOptions::new().read(true).write(true).open(path),
    }
}
