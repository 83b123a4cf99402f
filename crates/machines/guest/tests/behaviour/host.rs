//! The host's end of a guest's port: says what a test says, and hears what the manager answers.

use hecaton_testkit::patience;
use hecaton_vm::guest_port::{GuestMessage, HostMessage, Lines, line};
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// A host that is connected.
pub(crate) struct Host {
    stream: UnixStream,
    lines: Lines,
}

impl Host {
    pub(crate) fn new(stream: UnixStream) -> Host {
        stream.set_read_timeout(Some(patience())).unwrap();
        Host { stream, lines: Lines::default() }
    }

    pub(crate) fn say(&mut self, message: &HostMessage) {
        self.stream.write_all(line(message).as_bytes()).unwrap();
    }

    pub(crate) fn hear(&mut self) -> GuestMessage {
        let mut bytes = [0; 4096];
        loop {
            if let Some(message) = self.lines.next_message() {
                return message.expect("a message");
            }
            let count = read(&mut self.stream, &mut bytes).expect("something in time");
            assert!(count > 0, "the manager has gone");
            self.lines.take(&bytes[..count]);
        }
    }

    /// The manager's last answer. The manager may say before how small the machine can be already.
    pub(crate) fn hear_the_end(&mut self) -> GuestMessage {
        loop {
            match self.hear() {
                GuestMessage::Giving { .. } => {}
                end => return end,
            }
        }
    }

    pub(crate) fn is_silent(&mut self) -> bool {
        self.stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        let read = read(&mut self.stream, &mut [0; 1]).map_err(|error| error.kind());
        self.stream.set_read_timeout(Some(patience())).unwrap();
        read == Err(io::ErrorKind::WouldBlock)
    }
}

/// Reads what comes. A hook of the manager, which runs in this process, may end meanwhile: its
/// SIGCHLD interrupts a read that has a timeout.
pub(crate) fn read(stream: &mut UnixStream, bytes: &mut [u8]) -> io::Result<usize> {
    loop {
        match stream.read(bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}
