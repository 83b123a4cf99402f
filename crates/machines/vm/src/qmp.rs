//! QEMU's monitor protocol: JSON objects, one a line, over a Unix socket.
//!
//! Every wait has a timeout: a machine whose processor waits for a lost page answers no command
//! that must stop the processor. Events that come in between are kept, also those of unknown kinds.
//! Answers to commands that timed out are skipped. A QEMU that hangs as it ends gets SIGTERM
//! ([`process`]).

mod process;

use crate::refusal::{self, Reason, Refusal};
use process::Process;
use rustix::net::RecvFlags;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Longest line that is taken. `query-qmp-schema`, the longest answer that QEMU has, is shorter.
const MAX_LINE_BYTES: usize = 4 << 20;

/// Most events that are kept; the oldest go first.
const MAX_EVENTS: usize = 1024;

/// A connection to a machine's monitor, past its greeting.
#[derive(Debug)]
pub struct Monitor {
    path: PathBuf,
    stream: UnixStream,
    unread: Vec<u8>,
    events: VecDeque<Event>,
    commands: u64,
    process: Option<Process>,
    /// It has told of its guest's end since it last answered a command that was given after that.
    has_shut_down: bool,
}

/// Something that happened in the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its kind, such as `SHUTDOWN`, `RESET`, `STOP`, `BALLOON_CHANGE`.
    pub name: String,
    /// The event's data, as QEMU sends them.
    pub data: Value,
}

/// Why a command was not done.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// QEMU refused it.
    #[error("QEMU refused `{command}`: {reason}")]
    Refused {
        /// The command.
        command: String,
        /// In QEMU's words.
        reason: String,
    },
    /// No answer in time.
    #[error("QEMU's monitor {path} did not answer `{command}` within {ms} ms", ms = patience.as_millis())]
    Silent {
        /// The socket.
        path: PathBuf,
        /// The command.
        command: String,
        /// How long was waited.
        patience: Duration,
    },
    /// It has shut down, and hung as it ended. It was sent SIGTERM, by which it goes on to its end.
    #[error("QEMU has shut down, and did not answer `{command}` within {ms} ms nor end: it was sent SIGTERM", ms = patience.as_millis())]
    HungAtEnd {
        /// The command.
        command: String,
        /// How long was waited.
        patience: Duration,
    },
    /// The peer does not speak QMP.
    #[error("what listens at {path} does not speak QMP: {reason}")]
    Protocol {
        /// The socket.
        path: PathBuf,
        /// Why the message is not QMP.
        reason: String,
    },
    /// The connection failed, or QEMU ended.
    #[error("the connection to QEMU's monitor {path} failed")]
    Io {
        /// The socket.
        path: PathBuf,
        /// Error of the system call; `UnexpectedEof` if QEMU ended.
        source: io::Error,
    },
}

/// How a machine is, as `query-status` tells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunState {
    /// Whether its processors run.
    pub running: bool,
    /// QEMU's name for the state: `running`, `paused`, `suspended`, `shutdown`, …
    pub status: String,
}

/// How much memory a machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemorySize {
    /// At its start.
    pub base_bytes: u64,
    /// Plugged since.
    pub plugged_bytes: u64,
}

impl Monitor {
    /// Connects, and waits for the greeting.
    pub fn connect(path: &Path, patience: Duration) -> Result<Monitor, QmpError> {
        let failed = |source| QmpError::Io { path: path.to_owned(), source };
        let stream = UnixStream::connect(path).map_err(failed)?;
        stream.set_write_timeout(Some(patience)).map_err(failed)?;
        let mut monitor = Monitor {
            path: path.to_owned(),
            process: Process::behind(&stream),
            stream,
            unread: Vec::new(),
            events: VecDeque::new(),
            commands: 0,
            has_shut_down: false,
        };
        let until = Instant::now() + patience;
        let Some(greeting) = monitor.read_message(until)? else {
            return Err(monitor.silent("connect", patience));
        };
        if greeting.get("QMP").is_none() {
            return Err(monitor.protocol("the first line is no greeting"));
        }
        monitor.execute("qmp_capabilities", json!({}), patience)?;
        Ok(monitor)
    }

    /// The process at the other end: the one that listens, which is QEMU. None if it is in another
    /// process namespace.
    pub fn peer_pid(&self) -> Option<u32> {
        let pid = process::peer_pid(&self.stream)?;
        u32::try_from(pid.as_raw_nonzero().get()).ok()
    }

    /// Gives a command, and waits for what it returns. A QEMU that ends is asked nothing: its end
    /// is waited for as long, and is an error.
    pub fn execute(
        &mut self,
        command: &str,
        arguments: Value,
        patience: Duration,
    ) -> Result<Value, QmpError> {
        self.take_events(Instant::now())?;
        if self.has_shut_down {
            self.take_events(Instant::now() + patience)?;
        }
        self.commands += 1;
        let id = self.commands;
        let line = json!({ "execute": command, "arguments": arguments, "id": id });
        let written = self.stream.write_all(format!("{line}\n").as_bytes());
        written.map_err(|source| self.failed(source))?;
        let until = Instant::now() + patience;
        let had_shut_down = self.has_shut_down;
        loop {
            let Some(mut message) = self.read_message(until)? else {
                return Err(self.unanswered(command, patience));
            };
            if self.keep_event(&mut message) || message.get("id") != Some(&json!(id)) {
                continue;
            }
            if had_shut_down {
                // It is kept (`-no-shutdown`).
                self.has_shut_down = false;
            }
            if let Some(error) = message.get("error") {
                let reason = error["desc"].as_str().unwrap_or("no reason").to_owned();
                return Err(QmpError::Refused { command: command.to_owned(), reason });
            }
            return Ok(message["return"].take());
        }
    }

    /// Puts aside what has happened until then.
    fn take_events(&mut self, until: Instant) -> Result<(), QmpError> {
        while let Some(mut message) = self.read_message(until)? {
            self.keep_event(&mut message);
        }
        Ok(())
    }

    /// The next event, or none if time is up.
    pub fn next_event(&mut self, patience: Duration) -> Result<Option<Event>, QmpError> {
        let until = Instant::now() + patience;
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            let Some(mut message) = self.read_message(until)? else { return Ok(None) };
            self.keep_event(&mut message);
        }
    }

    /// How the machine is.
    pub fn status(&mut self, patience: Duration) -> Result<RunState, QmpError> {
        let state = self.execute("query-status", json!({}), patience)?;
        serde_json::from_value(state).map_err(|error| self.protocol(&error.to_string()))
    }

    /// Stops the processors. Returns when they have stopped.
    pub fn stop(&mut self, patience: Duration) -> Result<(), QmpError> {
        self.execute("stop", json!({}), patience).map(|_| ())
    }

    /// Lets the processors go on.
    pub fn resume(&mut self, patience: Duration) -> Result<(), QmpError> {
        self.execute("cont", json!({}), patience).map(|_| ())
    }

    /// How much memory the machine has.
    pub fn memory_size(&mut self, patience: Duration) -> Result<MemorySize, QmpError> {
        let size = self.execute("query-memory-size-summary", json!({}), patience)?;
        let field = |name: &str| size[name].as_u64();
        let base_bytes = field("base-memory").ok_or_else(|| self.protocol("no base-memory"))?;
        Ok(MemorySize { base_bytes, plugged_bytes: field("plugged-memory").unwrap_or(0) })
    }

    /// Lists what a paged guest must not have. It was plugged since the start, or was there from
    /// the start of a machine that `hecaton vm` did not start.
    pub fn refusals(&mut self, patience: Duration) -> Result<Vec<Refusal>, QmpError> {
        let mut refused = Vec::new();
        for place in ["/machine/peripheral", "/machine/peripheral-anon"] {
            let listed = self.execute("qom-list", json!({ "path": place }), patience)?;
            for device in listed.as_array().into_iter().flatten() {
                let name = device["name"].as_str().unwrap_or_default();
                let driver = device["type"].as_str().and_then(|kind| kind.strip_prefix("child<"));
                let driver = driver.and_then(|kind| kind.strip_suffix('>')).unwrap_or_default();
                if let Some(reason) = refusal::of_device(driver) {
                    refused.push(Refusal::new(format!("device {driver} `{name}`"), reason));
                }
            }
        }
        let drives = self.execute("query-block", json!({}), patience)?;
        for drive in drives.as_array().into_iter().flatten() {
            if drive["inserted"]["cache"]["direct"] == json!(true) {
                let name = drive["inserted"]["node-name"].as_str();
                let name = name.or(drive["device"].as_str()).unwrap_or_default();
                refused.push(Refusal::new(format!("drive `{name}`"), Reason::DirectIo));
            }
        }
        let backends = self.execute("query-memdev", json!({}), patience)?;
        for backend in backends.as_array().into_iter().flatten() {
            let reason = if backend["share"] == json!(false) {
                Some(Reason::Private)
            } else if backend["prealloc"] == json!(true) {
                Some(Reason::Preallocated)
            } else {
                None
            };
            let name = backend["id"].as_str().unwrap_or("without a name");
            refused.extend(
                reason.map(|reason| Refusal::new(format!("memory backend `{name}`"), reason)),
            );
        }
        Ok(refused)
    }

    /// Puts an event aside; `false` if `message` is none.
    fn keep_event(&mut self, message: &mut Value) -> bool {
        let Some(name) = message.get("event").and_then(Value::as_str).map(str::to_owned) else {
            return false;
        };
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
        }
        self.has_shut_down |= name == "SHUTDOWN";
        self.events.push_back(Event { name, data: message["data"].take() });
        true
    }

    /// The next line, or none if time is up and none has come.
    fn read_message(&mut self, until: Instant) -> Result<Option<Value>, QmpError> {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                if line.trim_ascii().is_empty() {
                    continue;
                }
                let message = serde_json::from_slice(&line);
                return message.map(Some).map_err(|error| self.protocol(&error.to_string()));
            }
            if self.unread.len() > MAX_LINE_BYTES {
                return Err(self.protocol("a line without an end"));
            }
            let left = until.saturating_duration_since(Instant::now());
            let mut bytes = [0; 16 << 10];
            match self.read_within(left, &mut bytes) {
                Ok(0) => return Err(self.failed(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => self.unread.extend_from_slice(&bytes[..count]),
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock if left.is_zero() => return Ok(None),
                    io::ErrorKind::WouldBlock => {}
                    _ => return Err(self.failed(error)),
                },
            }
        }
    }

    /// Reads what has come, or comes within `left`; else that is [`io::ErrorKind::WouldBlock`].
    fn read_within(&mut self, left: Duration, bytes: &mut [u8]) -> io::Result<usize> {
        if left.is_zero() {
            let (read, _) = rustix::net::recv(&self.stream, bytes, RecvFlags::DONTWAIT)?;
            return Ok(read);
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(bytes)
    }

    fn failed(&self, source: io::Error) -> QmpError {
        QmpError::Io { path: self.path.clone(), source }
    }

    /// Nothing has come in time.
    fn unanswered(&self, command: &str, patience: Duration) -> QmpError {
        if self.has_shut_down && self.process.as_ref().is_some_and(Process::terminate) {
            let error = QmpError::HungAtEnd { command: command.to_owned(), patience };
            tracing::warn!(monitor = %self.path.display(), %error, "QEMU is helped to its end");
            return error;
        }
        self.silent(command, patience)
    }

    fn silent(&self, command: &str, patience: Duration) -> QmpError {
        QmpError::Silent { path: self.path.clone(), command: command.to_owned(), patience }
    }

    pub(crate) fn protocol(&self, reason: &str) -> QmpError {
        QmpError::Protocol { path: self.path.clone(), reason: reason.to_owned() }
    }
}

/// A monitor for tests.
#[cfg(test)]
pub(crate) mod fake {
    use super::*;
    use hecaton_testkit::patience;
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;
    use std::thread::{self, JoinHandle};

    pub(crate) const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": ["oob"]}}"#;

    /// A monitor that answers each line that it reads by what `answer` makes of it.
    pub(crate) fn monitor(
        greeting: &'static str,
        mut answer: impl FnMut(&Value) -> String + Send + 'static,
    ) -> (Result<Monitor, QmpError>, JoinHandle<()>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            writeln!(stream, "{greeting}").unwrap();
            let reader = BufReader::new(stream.try_clone().unwrap());
            for line in reader.lines().map_while(Result::ok) {
                let text = answer(&serde_json::from_str(&line).unwrap());
                if stream.write_all(text.as_bytes()).is_err() {
                    return;
                }
            }
        });
        (Monitor::connect(&path, patience()), server)
    }

    pub(crate) fn returns(request: &Value, value: &str) -> String {
        format!("{{\"return\": {value}, \"id\": {}}}\r\n", request["id"])
    }
}

#[cfg(test)]
mod tests {
    use super::fake::{GREETING, monitor, returns};
    use super::*;
    use hecaton_testkit::patience;

    #[test]
    fn answers_are_told_from_events_and_from_late_answers() {
        let (monitor, server) = monitor(GREETING, |request| match request["execute"].as_str() {
            Some("query-status") => {
                "{\"event\": \"STOP\", \"data\": {\"x\": 1}, \"timestamp\": {}}\n".to_owned()
                    + "{\"return\": {\"status\": \"late\", \"running\": true}, \"id\": 77}\n"
                    + &returns(request, r#"{"status": "paused", "running": false, "new": 1}"#)
            }
            Some("nonsense") => format!(
                "{{\"error\": {{\"class\": \"x\", \"desc\": \"no such\"}}, \"id\": {}}}\n",
                request["id"]
            ),
            _ => returns(request, "{}"),
        });
        let mut monitor = monitor.expect("connected");
        let state = monitor.status(patience()).expect("told");
        assert_eq!(state, RunState { running: false, status: "paused".into() });
        let event = monitor.next_event(patience()).expect("read").expect("kept");
        assert_eq!((event.name.as_str(), &event.data["x"]), ("STOP", &json!(1)));
        assert!(monitor.next_event(Duration::ZERO).expect("read").is_none());
        let error = monitor.execute("nonsense", json!({}), patience()).expect_err("refused");
        assert_eq!(error.to_string(), "QEMU refused `nonsense`: no such");
        drop(monitor);
        server.join().unwrap();
    }

    #[test]
    fn a_silent_monitor_and_a_dead_one_are_errors() {
        let (silent, server) = monitor(GREETING, |request| match request["execute"].as_str() {
            Some("qmp_capabilities") => returns(request, "{}"),
            _ => String::new(),
        });
        let mut silent = silent.expect("connected");
        let error = silent.stop(Duration::from_millis(20)).expect_err("silent");
        assert!(matches!(error, QmpError::Silent { .. }), "{error}");
        drop(silent);
        server.join().unwrap();

        let (other, server) = monitor("hello", |_| String::new());
        assert!(matches!(other, Err(QmpError::Protocol { .. })));
        drop(other);
        server.join().unwrap();
        let missing = Monitor::connect(Path::new("/nowhere/qmp"), patience());
        assert!(matches!(missing, Err(QmpError::Io { .. })));
    }

    #[test]
    fn what_was_plugged_at_run_time_is_seen() {
        let (monitor, server) = monitor(GREETING, |request| {
            let path = request["arguments"]["path"].as_str();
            let value = match (request["execute"].as_str(), path) {
                (_, Some("/machine/peripheral")) => {
                    r#"[{"name": "type", "type": "string"},
                        {"name": "gpu", "type": "child<vfio-pci>"},
                        {"name": "net0", "type": "child<virtio-net-pci>"}]"#
                }
                (Some("query-block"), _) => {
                    r#"[{"device": "d0", "inserted": {"cache": {"direct": true}}},
                        {"device": "d1", "inserted": {"cache": {"direct": false}}}, {"device": "d2"}]"#
                }
                (Some("query-memdev"), _) => {
                    r#"[{"id": "a", "share": true, "prealloc": false},
                        {"id": "b", "share": false, "prealloc": false}]"#
                }
                (Some("qom-list"), _) => "[]",
                _ => "{}",
            };
            returns(request, &value.replace('\n', " "))
        });
        let refused = monitor.expect("connected").refusals(patience()).expect("told");
        let reasons: Vec<_> = refused.iter().map(|refusal| refusal.reason).collect();
        assert_eq!(reasons, [Reason::PinnedByDevice, Reason::DirectIo, Reason::Private]);
        assert!(refused[0].to_string().contains("`gpu`"), "{}", refused[0]);
        server.join().unwrap();
    }
}
