//! The channel by which a monitor is told of what it has not asked for: that the drive has another
//! size.
//!
//! The `vhost` crate takes the channel from the monitor, but its `Backend` neither has this message
//! (`VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`) nor gives its descriptor away. So the message that
//! brings the channel is looked at before the crate takes it off the socket, and the one message
//! that is sent is written here. Nobody answers it, for that is not asked for: the monitor then
//! reads the configuration space as it did at first, from whoever serves its own channel, which may
//! not be who waits here.

use rustix::io::{Errno, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recv, recvmsg, send,
};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Length of a message's header: its code, its flags and the number of bytes that follow.
const HEADER_BYTES: usize = 12;

/// The monitor's message that has the channel with it (`VHOST_USER_SET_BACKEND_REQ_FD`).
const SET_BACKEND_REQ_FD: u32 = 21;

/// "Your configuration space has changed", without a wish for an answer.
const CONFIG_CHANGE: [u32; 3] = [2, VERSION, 0];

/// Version of the protocol, in the lowest bits of the flags.
const VERSION: u32 = 1;

/// A way to the monitor.
#[derive(Debug)]
pub(super) struct BackendChannel(OwnedFd);

impl BackendChannel {
    /// The one that the monitor's next message brings, if that is what it is about; waits for a
    /// message. The message stays on the socket, for the one who reads it.
    pub(super) fn offered(socket: BorrowedFd<'_>) -> Option<BackendChannel> {
        let mut header = [0; HEADER_BYTES];
        let (bytes, _) = recv(socket, &mut header, RecvFlags::PEEK).ok()?;
        let code = u32::from_ne_bytes(header[..4].try_into().expect("four bytes"));
        if bytes < HEADER_BYTES || code != SET_BACKEND_REQ_FD {
            return None;
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut files = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC;
        recvmsg(socket, &mut [IoSliceMut::new(&mut header)], &mut files, flags).ok()?;
        let found = files.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        found.map(BackendChannel)
    }

    /// Tells the monitor to look at the drive's configuration space. Never waits: one that has not
    /// read what it was told before will look later than this.
    pub(super) fn config_has_changed(&self) -> Result<(), Errno> {
        let message = CONFIG_CHANGE.map(u32::to_ne_bytes).concat();
        loop {
            match send(&self.0, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(_) | Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::IoSlice;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, sendmsg};
    use std::io::{Read as _, Write as _};
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    fn message(code: u32) -> Vec<u8> {
        [code, 1, 0].map(u32::to_ne_bytes).concat()
    }

    #[test]
    fn the_channel_is_taken_and_its_message_stays() {
        let (monitor, ours) = UnixStream::pair().unwrap();
        let (mut theirs, channel) = UnixStream::pair().unwrap();
        let fds = [channel.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut files = SendAncillaryBuffer::new(&mut space);
        assert!(files.push(SendAncillaryMessage::ScmRights(&fds)));
        let said = message(SET_BACKEND_REQ_FD);
        sendmsg(&monitor, &[IoSlice::new(&said)], &mut files, SendFlags::empty()).unwrap();
        let found = BackendChannel::offered(ours.as_fd()).unwrap();
        let mut left = [0; HEADER_BYTES];
        (&ours).read_exact(&mut left).unwrap();
        assert_eq!(left[..], said);
        drop(channel);

        found.config_has_changed().unwrap();
        let mut told = [0; HEADER_BYTES];
        theirs.read_exact(&mut told).unwrap();
        assert_eq!(told, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        // One that does not listen is not waited for.
        for _ in 0..100_000 {
            found.config_has_changed().unwrap();
        }
        drop(theirs);
        found.config_has_changed().unwrap_err();
    }

    #[test]
    fn other_messages_bring_none() {
        let (mut monitor, ours) = UnixStream::pair().unwrap();
        let mut read = |said: &[u8]| {
            monitor.write_all(said).unwrap();
            let found = BackendChannel::offered(ours.as_fd());
            (&ours).read_exact(&mut vec![0; said.len()]).unwrap();
            found
        };
        assert!(read(&message(1)).is_none());
        // Without a descriptor, and cut off.
        assert!(read(&message(SET_BACKEND_REQ_FD)).is_none());
        assert!(read(&message(SET_BACKEND_REQ_FD)[..5]).is_none());
        drop(monitor);
        assert!(BackendChannel::offered(ours.as_fd()).is_none());
    }
}
