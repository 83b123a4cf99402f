//! Defines host-guest messages before memory moves: JSON objects, one a line, on virtio-serial.
//!
//! Virtio-serial needs no address, host module or permission, as vsock would. Only the host's agent
//! can hold QEMU's socket. The host sends the present state, and repeats it to a guest that greets:
//! neither side keeps what it heard before it was killed.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Name of the port; its path in the guest is `/dev/virtio-ports/` and this name.
pub const PORT_NAME: &str = "org.hecaton.guest.0";

/// Longest accepted line; a longer one is skipped.
pub const MAX_LINE_BYTES: usize = 64 << 10;

/// A message from the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub enum HostMessage {
    /// The VM will have this size in the end. The notice replaces any earlier size.
    Target {
        /// Number of the notice, which [`GuestMessage::Ready`] answers.
        id: u64,
        /// Present size, in bytes.
        size_bytes: u64,
        /// Final size, in bytes.
        target_bytes: u64,
    },
    /// The VM will be killed.
    Evict {
        /// Number of the notice, which [`GuestMessage::Ready`] answers.
        id: u64,
        /// Time until the kill, in milliseconds.
        within_ms: u64,
    },
    /// An earlier notice no longer holds.
    Cancelled {
        /// The cancelled notice.
        what: Notice,
    },
}

/// A notice that can be cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Notice {
    /// A size to shrink to.
    Target,
    /// An eviction.
    Evict,
}

/// A message from the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub enum GuestMessage {
    /// The guest listens from now on, and knows no earlier message.
    Hello,
    /// Applications still give back, and the host can take what they have given so far.
    Giving {
        /// Number of the [`HostMessage::Target`].
        id: u64,
        /// Size that the VM can already have, in bytes; lower in each message.
        size_bytes: u64,
    },
    /// Applications have given back what they can, or know that the VM ends.
    Ready {
        /// Number of the answered notice.
        id: u64,
        /// Memory available in the guest, in bytes.
        available_bytes: u64,
        /// Applications that did not comply in time.
        late: Vec<String>,
    },
}

/// Encodes a message as one line.
pub fn line(message: &impl Serialize) -> String {
    serde_json::to_string(message).expect("messages are plain") + "\n"
}

/// Decodes messages from a stream of bytes.
#[derive(Debug, Default)]
pub struct Lines {
    unread: Vec<u8>,
    /// The current line is too long.
    is_passing: bool,
}

impl Lines {
    /// Appends received bytes.
    pub fn take(&mut self, bytes: &[u8]) {
        self.unread.extend_from_slice(bytes);
    }

    /// Decodes the next whole line, or says why it is no message. Empty lines are skipped.
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
