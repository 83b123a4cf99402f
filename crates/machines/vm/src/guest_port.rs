//! What host and guest say to each other before memory moves: JSON objects, one a line, over a virtio-serial port.
//!
//! Virtio-serial and not vsock: it needs no address, no module on the host and no permission, and whoever holds QEMU's socket is
//! the host's agent and nobody else. The host says what is so, and says it again to a guest that greets: neither
//! side keeps what the other said before it was killed.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The port's name in the guest, where it is `/dev/virtio-ports/` and this.
pub const PORT_NAME: &str = "org.hecaton.guest.0";

/// Longest line that is taken; a longer one is passed over.
pub const MAX_LINE_BYTES: usize = 64 << 10;

/// What the host says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub enum HostMessage {
    /// The machine will have this size in the end. What was said of its size before is void.
    Target {
        /// To be answered with [`GuestMessage::Ready`].
        id: u64,
        /// What it has now, in bytes.
        size_bytes: u64,
        /// What it will have, in bytes.
        target_bytes: u64,
    },
    /// The machine will be killed.
    Evict {
        /// To be answered with [`GuestMessage::Ready`].
        id: u64,
        /// How long until then, in milliseconds.
        within_ms: u64,
    },
    /// It will not be after all.
    Cancelled {
        /// What will not be.
        what: Notice,
    },
}

/// What can be cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Notice {
    /// A size to shrink to.
    Target,
    /// An eviction.
    Evict,
}

/// What the guest says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub enum GuestMessage {
    /// It listens from now on, and knows nothing of what was said before.
    Hello,
    /// Its applications give back still, and what they have given so far can be taken.
    Giving {
        /// The notice that it is about, a [`HostMessage::Target`].
        id: u64,
        /// The size that the machine can have already, in bytes; less each time that it is said.
        size_bytes: u64,
    },
    /// Its applications have given back what they can, or know that the machine ends.
    Ready {
        /// The notice that it answers.
        id: u64,
        /// What is available in the guest, in bytes.
        available_bytes: u64,
        /// The applications that did not do as they were told in time.
        late: Vec<String>,
    },
}

/// A message as it is sent.
pub fn line(message: &impl Serialize) -> String {
    serde_json::to_string(message).expect("messages are plain") + "\n"
}

/// Makes messages of bytes as they come.
#[derive(Debug, Default)]
pub struct Lines {
    unread: Vec<u8>,
    /// The line that comes is too long.
    is_passing: bool,
}

impl Lines {
    /// Takes what has come.
    pub fn take(&mut self, bytes: &[u8]) {
        self.unread.extend_from_slice(bytes);
    }

    /// The next whole line as a message; the reason if it is none. Empty lines are nothing.
    pub fn next_message<T: DeserializeOwned>(&mut self) -> Option<Result<T, String>> {
        loop {
            let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') else {
                if self.unread.len() > MAX_LINE_BYTES {
                    self.unread.clear();
                    self.is_passing = true;
                }
                return None;
            };
            let line: Vec<u8> = self.unread.drain(..=end).collect();
            if std::mem::take(&mut self.is_passing) || line.len() > MAX_LINE_BYTES {
                return Some(Err(format!("a line has more than {MAX_LINE_BYTES} bytes")));
            }
            if line.trim_ascii().is_empty() {
                continue;
            }
            return Some(serde_json::from_slice(&line).map_err(|error| {
                format!("`{}`: {error}", String::from_utf8_lossy(line.trim_ascii()))
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_these_lines() {
        let told = [
            HostMessage::Target { id: 1, size_bytes: 8, target_bytes: 4 },
            HostMessage::Evict { id: 2, within_ms: 30_000 },
            HostMessage::Cancelled { what: Notice::Evict },
        ];
        let text = "{\"message\":\"target\",\"id\":1,\"size_bytes\":8,\"target_bytes\":4}\n\
                    {\"message\":\"evict\",\"id\":2,\"within_ms\":30000}\n\
                    {\"message\":\"cancelled\",\"what\":\"evict\"}\n";
        assert_eq!(told.iter().map(line).collect::<String>(), text);
        let mut lines = Lines::default();
        let mut heard = Vec::new();
        for byte in text.bytes() {
            lines.take(&[byte]);
            heard.extend(lines.next_message::<HostMessage>().map(Result::unwrap));
        }
        assert_eq!(heard, told);
        let giving = GuestMessage::Giving { id: 1, size_bytes: 6 };
        let ready = GuestMessage::Ready { id: 1, available_bytes: 5, late: vec!["a".into()] };
        assert_eq!(
            line(&GuestMessage::Hello) + &line(&giving) + &line(&ready),
            "{\"message\":\"hello\"}\n\
             {\"message\":\"giving\",\"id\":1,\"size_bytes\":6}\n\
             {\"message\":\"ready\",\"id\":1,\"available_bytes\":5,\"late\":[\"a\"]}\n"
        );
    }

    #[test]
    fn what_is_no_message_is_passed_over() {
        let mut lines = Lines::default();
        lines.take(b"\n{\"message\":\"who\"}\n");
        let error = lines.next_message::<HostMessage>().unwrap().unwrap_err();
        assert!(error.contains("who"), "{error}");
        for _ in 0..3 {
            lines.take(&[b'x'; MAX_LINE_BYTES]);
            assert_eq!(lines.next_message::<HostMessage>(), None);
            assert!(lines.unread.len() <= MAX_LINE_BYTES, "no line takes all memory");
        }
        lines.take(b"\n{\"message\":\"cancelled\",\"what\":\"target\"}\n");
        let error = lines.next_message::<HostMessage>().unwrap().unwrap_err();
        assert!(error.contains("65536 bytes"), "{error}");
        let next = lines.next_message::<HostMessage>();
        assert_eq!(next, Some(Ok(HostMessage::Cancelled { what: Notice::Target })));
    }
}
