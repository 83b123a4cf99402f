//! Answers that wait for the client to take them.

use super::wire::{Request, Session, chunk, only_chunk, simple_reply};
use crate::volume::Contents;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IoSlice};

/// Longest head of the answer to a read: a structured reply's, an offset, and the length of a hole.
const MAX_HEAD_BYTES: usize = 32;

/// Head of the answer to a read, and whether data follow it.
pub(super) struct ReadHead {
    bytes: [u8; MAX_HEAD_BYTES],
    len: usize,
    pub(super) has_data: bool,
}

impl ReadHead {
    pub(super) fn of(request: &Request, session: Session, contents: Contents) -> ReadHead {
        let Request { cookie, offset, length, .. } = *request;
        let at = offset.to_be_bytes();
        match (session.structured, contents) {
            (false, _) => ReadHead::new(&[&simple_reply(cookie, 0)], true),
            (true, Contents::Data) => {
                let head = only_chunk(cookie, chunk::OFFSET_DATA, 8 + length);
                ReadHead::new(&[&head, &at], true)
            }
            (true, Contents::Hole) => {
                let head = only_chunk(cookie, chunk::OFFSET_HOLE, 12);
                ReadHead::new(&[&head, &at, &length.to_be_bytes()], false)
            }
        }
    }

    fn new(parts: &[&[u8]], has_data: bool) -> ReadHead {
        let mut head = ReadHead { bytes: [0; MAX_HEAD_BYTES], len: 0, has_data };
        for part in parts {
            head.bytes[head.len..][..part.len()].copy_from_slice(part);
            head.len += part.len();
        }
        head
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// An answer, and how much of the client's budget its request has.
pub(super) struct Reply {
    head: ReadHead,
    data: Vec<u8>,
    data_bytes: usize,
    pub(super) held: usize,
}

impl Reply {
    /// To a read, whose data `data` begins with.
    pub(super) fn of_read(
        request: &Request,
        session: Session,
        contents: Contents,
        data: Vec<u8>,
        held: usize,
    ) -> Reply {
        let head = ReadHead::of(request, session, contents);
        let data_bytes = if head.has_data { request.length as usize } else { 0 };
        Reply { head, data, data_bytes, held }
    }

    /// That something is done.
    pub(super) fn done(cookie: u64, held: usize) -> Reply {
        let head = ReadHead::new(&[&simple_reply(cookie, 0)], false);
        Reply { head, data: Vec::new(), data_bytes: 0, held }
    }

    /// The buffer that it had.
    pub(super) fn into_buffer(self) -> Vec<u8> {
        self.data
    }

    fn parts(&self) -> [&[u8]; 2] {
        [self.head.bytes(), &self.data[..self.data_bytes]]
    }

    fn len(&self) -> usize {
        self.head.len + self.data_bytes
    }
}

/// Answers in the order in which they are to be sent.
#[derive(Default)]
pub(super) struct Outbox {
    replies: VecDeque<Reply>,
    /// Bytes of the first one that are sent.
    sent: usize,
}

impl Outbox {
    pub(super) fn len(&self) -> usize {
        self.replies.len()
    }

    pub(super) fn extend(&mut self, replies: impl Iterator<Item = Reply>) {
        self.replies.extend(replies);
    }

    /// Sends all of it, or, with [`SendFlags::DONTWAIT`], what the socket takes; hands over what is
    /// sent.
    pub(super) fn send(
        &mut self,
        socket: &File,
        flags: SendFlags,
        sent: &mut dyn FnMut(Reply),
    ) -> io::Result<()> {
        while !self.replies.is_empty() {
            let mut slices: Vec<IoSlice<'_>> =
                self.replies.iter().flat_map(Reply::parts).map(IoSlice::new).collect();
            let mut left = slices.as_mut_slice();
            IoSlice::advance_slices(&mut left, self.sent);
            let flags = flags | SendFlags::NOSIGNAL;
            match sendmsg(socket, left, &mut SendAncillaryBuffer::default(), flags) {
                Ok(bytes) => self.sent += bytes,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) if flags.contains(SendFlags::DONTWAIT) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            while let Some(first) = self.replies.front()
                && first.len() <= self.sent
            {
                self.sent -= first.len();
                self.replies.pop_front().into_iter().for_each(&mut *sent);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::Command;
    use super::*;
    use std::io::Read as _;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn what_a_client_does_not_take_waits_and_comes_whole_and_in_order() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let socket = File::from(OwnedFd::from(ours));
        let bytes = 100_000;
        let reply = |cookie: u64| {
            let (flags, command, length) = (0, Command::Read, bytes as u32);
            let request = Request { flags, command, cookie, offset: 0, length };
            let data = vec![cookie as u8; bytes + 7];
            Reply::of_read(&request, Session::default(), Contents::Data, data, bytes)
        };
        let mut outbox = Outbox::default();
        outbox.extend((0..20).map(reply).chain([Reply::done(20, 0)]));
        let mut sent = 0;
        outbox.send(&socket, SendFlags::DONTWAIT, &mut |_| sent += 1).unwrap();
        assert!(sent < 20, "it has no room for all of it");
        assert_eq!(outbox.len(), 21 - sent);
        let taking = std::thread::spawn(move || {
            for cookie in 0..=20u64 {
                let mut head = [0; 16];
                theirs.read_exact(&mut head).unwrap();
                assert_eq!(head, simple_reply(cookie, 0));
                let mut data = vec![0; if cookie < 20 { bytes } else { 0 }];
                theirs.read_exact(&mut data).unwrap();
                assert!(data.iter().all(|byte| *byte == cookie as u8));
            }
        });
        outbox.send(&socket, SendFlags::empty(), &mut |_| sent += 1).unwrap();
        taking.join().unwrap();
        assert_eq!((sent, outbox.len()), (21, 0));
    }
}
