//! Lines of JSON over a Unix socket, with file descriptors beside them.
//!
//! The node speaks this way with everything on its host: with its donors over the socket that is
//! their standard input, with its pagers over theirs, and with pagers, launchers and the command
//! line over `node.sock`. A line that brings descriptors says how many, because the kernel ties
//! them to bytes of the stream and not to lines.

use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use rustix::process::Pid;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Longest line that is read: more is a mistake of the sender, or malice.
pub const MAX_LINE_BYTES: usize = 1 << 20;

/// Most descriptors that one line brings; the kernel's own limit is 253 a message.
pub const MAX_FDS_PER_LINE: usize = 250;

/// Most descriptors that wait for the line that they belong to.
const MAX_QUEUED_FDS: usize = 2 * MAX_FDS_PER_LINE;

/// The reading end: bytes and descriptors that came, up to the line that claims them.
#[derive(Debug)]
pub struct Receiver {
    stream: UnixStream,
    unread: Vec<u8>,
    /// Bytes at the front of `unread` that hold no line's end.
    searched: usize,
    fds: VecDeque<OwnedFd>,
}

impl Receiver {
    /// Reads from `stream`.
    pub fn new(stream: UnixStream) -> Receiver {
        Receiver { stream, unread: Vec::new(), searched: 0, fds: VecDeque::new() }
    }

    /// The next line's value; `None` when the other side has closed.
    pub fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let Some(line) = self.next_line()? else { return Ok(None) };
        serde_json::from_slice(&line).map(Some).map_err(|error| {
            io::Error::new(io::ErrorKind::InvalidData, format!("not a known message: {error}"))
        })
    }

    /// The descriptors that the line just received has announced.
    pub fn take_fds(&mut self, count: usize) -> io::Result<Vec<OwnedFd>> {
        if count > self.fds.len() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{count} descriptors were announced, {} came", self.fds.len()),
            ));
        }
        Ok(self.fds.drain(..count).collect())
    }

    fn next_line(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            if let Some(at) = self.unread[self.searched..].iter().position(|&byte| byte == b'\n') {
                let rest = self.unread.split_off(self.searched + at + 1);
                self.searched = 0;
                return Ok(Some(std::mem::replace(&mut self.unread, rest)));
            }
            self.searched = self.unread.len();
            if self.unread.len() > MAX_LINE_BYTES {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("a line of more than {MAX_LINE_BYTES} bytes"),
                ));
            }
            if !self.read_more()? {
                return match self.unread.is_empty() {
                    true => Ok(None),
                    false => Err(io::ErrorKind::UnexpectedEof.into()),
                };
            }
        }
    }

    /// `false` at the end of the stream.
    fn read_more(&mut self) -> io::Result<bool> {
        let mut bytes = [0u8; 16 << 10];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS_PER_LINE))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let message = loop {
            match rustix::net::recvmsg(
                &self.stream,
                &mut [IoSliceMut::new(&mut bytes)],
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC,
            ) {
                Err(Errno::INTR) => {}
                // The other side died with bytes of ours unread.
                Err(Errno::CONNRESET) => return Ok(false),
                other => break other?,
            }
        };
        for part in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = part {
                self.fds.extend(fds);
            }
        }
        if message.flags.contains(ReturnFlags::CTRUNC) || self.fds.len() > MAX_QUEUED_FDS {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "more descriptors came than can be taken; is the limit of open files too low?",
            ));
        }
        self.unread.extend_from_slice(&bytes[..message.bytes]);
        Ok(message.bytes > 0)
    }
}

/// The process at the other end, if it is one that may be spoken to: of this process's user, or
/// root's.
pub fn check_peer(stream: &UnixStream) -> io::Result<Pid> {
    let peer = socket_peercred(stream)?;
    let user = rustix::process::geteuid();
    if peer.uid != user && !peer.uid.is_root() {
        let (theirs, ours) = (peer.uid.as_raw(), user.as_raw());
        let reason = format!("this process serves user {ours} and root, not user {theirs}");
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
    }
    Ok(peer.pid)
}

/// Writes `message` as one line, with `fds` beside it.
pub fn send<T: Serialize>(
    stream: &UnixStream,
    message: &T,
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    assert!(fds.len() <= MAX_FDS_PER_LINE, "{} descriptors in one line", fds.len());
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    let mut unsent = line.as_slice();
    // The descriptors go with the first bytes; what a full socket left over goes without.
    let mut fds = fds;
    while !unsent.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS_PER_LINE))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::other("the descriptors do not fit in a message"));
        }
        match rustix::net::sendmsg(
            stream.as_fd(),
            &[IoSlice::new(unsent)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        ) {
            Ok(sent) => {
                unsent = &unsent[sent..];
                fds = &[];
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::io::{Read, Seek, SeekFrom, Write};

    fn pair() -> (UnixStream, Receiver) {
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        (ours, Receiver::new(theirs))
    }

    fn file_with(text: &str) -> std::fs::File {
        let mut file = tempfile::tempfile().expect("a temporary file");
        file.write_all(text.as_bytes()).expect("written");
        file
    }

    #[test]
    fn lines_come_whole_however_they_are_cut() {
        let (mut stream, mut receiver) = pair();
        let writer = std::thread::spawn(move || {
            for chunk in b"{\"a\":1}\n{\"b\":[2,3]}\n".chunks(3) {
                stream.write_all(chunk).expect("written");
            }
        });
        assert_eq!(receiver.receive::<Value>().unwrap(), Some(json!({"a": 1})));
        assert_eq!(receiver.receive::<Value>().unwrap(), Some(json!({"b": [2, 3]})));
        writer.join().expect("joined");
        assert_eq!(receiver.receive::<Value>().unwrap(), None);
    }

    #[test]
    fn descriptors_stay_with_their_line() {
        let (stream, mut receiver) = pair();
        let (one, two, three) = (file_with("one"), file_with("two"), file_with("three"));
        send(&stream, &json!({"fds": 2}), &[one.as_fd(), two.as_fd()]).unwrap();
        send(&stream, &json!({"fds": 0}), &[]).unwrap();
        send(&stream, &json!({"fds": 1}), &[three.as_fd()]).unwrap();
        let mut seen = Vec::new();
        for _ in 0..3 {
            let line: Value = receiver.receive().unwrap().expect("a line");
            let count = line["fds"].as_u64().expect("a count") as usize;
            for fd in receiver.take_fds(count).unwrap() {
                let mut file = std::fs::File::from(fd);
                file.seek(SeekFrom::Start(0)).unwrap();
                let mut text = String::new();
                file.read_to_string(&mut text).unwrap();
                seen.push(text);
            }
        }
        assert_eq!(seen, ["one", "two", "three"]);
        assert!(receiver.take_fds(1).is_err(), "none is left to claim");
    }

    #[test]
    fn a_line_larger_than_the_socket_arrives_with_its_descriptors() {
        let (stream, mut receiver) = pair();
        let long = "x".repeat(MAX_LINE_BYTES - 100);
        let expected = long.clone();
        let writer = std::thread::spawn(move || {
            let file = file_with("held");
            send(&stream, &json!({"text": long}), &[file.as_fd()]).unwrap();
        });
        let line: Value = receiver.receive().unwrap().expect("a line");
        assert_eq!(line["text"], expected);
        assert_eq!(receiver.take_fds(1).unwrap().len(), 1);
        writer.join().expect("joined");
    }

    #[test]
    fn an_endless_line_a_half_line_and_nonsense_are_errors() {
        let (mut stream, mut receiver) = pair();
        let writer = std::thread::spawn(move || {
            // Fails once the receiver hangs up.
            let _ = stream.write_all(&vec![b'x'; 4 * MAX_LINE_BYTES]);
        });
        assert!(receiver.receive::<Value>().is_err());
        drop(receiver);
        writer.join().expect("joined");

        let (mut stream, mut receiver) = pair();
        stream.write_all(b"{\"a\":").unwrap();
        drop(stream);
        assert!(receiver.receive::<Value>().is_err());

        let (mut stream, mut receiver) = pair();
        stream.write_all(b"hello\n").unwrap();
        assert!(receiver.receive::<Value>().is_err());
    }
}
