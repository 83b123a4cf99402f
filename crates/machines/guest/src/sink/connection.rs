//! A connection to an application that is asked line by line. Made anew for each round: an
//! application that was started again in between is no special case.

use super::SinkError;
use std::fmt;
use std::io::{self, BufRead as _, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// How long an application may take to accept, and to say something.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long a connection is of use, however often something is said.
const LONGEST: Duration = Duration::from_secs(5);

/// Longest line that is taken.
const MAX_LINE_BYTES: u64 = 64 << 10;

/// Where somebody listens: `unix:PATH` or `HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// A host and a port.
    Tcp(String),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        let is_port = |(host, port): (&str, &str)| !host.is_empty() && port.parse::<u16>().is_ok();
        match text.strip_prefix("unix:") {
            Some(path) if path.starts_with('/') => Ok(Address::Unix(path.into())),
            None if text.rsplit_once(':').is_some_and(is_port) => Ok(Address::Tcp(text.to_owned())),
            _ => Err(format!(
                "`{text}` is no address; write unix:/PATH, or HOST:PORT such as 127.0.0.1:6379"
            )),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tcp(text) => f.write_str(text),
        }
    }
}

trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

/// A stream that is not read for any longer.
struct Bounded {
    stream: Box<dyn Stream>,
    until: Instant,
}

impl Read for Bounded {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match Instant::now() < self.until {
            true => self.stream.read(bytes),
            false => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

/// An open connection.
pub(super) struct Connection {
    address: Address,
    stream: BufReader<Bounded>,
}

impl Connection {
    pub(super) fn open(address: &Address) -> Result<Connection, SinkError> {
        let stream = connect(address)
            .map_err(|source| SinkError::Unreachable { address: address.clone(), source })?;
        let stream = Bounded { stream, until: Instant::now() + LONGEST };
        Ok(Connection { address: address.clone(), stream: BufReader::new(stream) })
    }

    /// Sends a command; `name` is what errors call it.
    pub(super) fn send(&mut self, name: &str, bytes: &[u8]) -> Result<(), SinkError> {
        let written = self.stream.get_mut().stream.write_all(bytes);
        written.map_err(|source| self.silent(name, source))
    }

    /// The next line of the answer to `name`, without its end.
    pub(super) fn line(&mut self, name: &str) -> Result<String, SinkError> {
        let mut line = Vec::new();
        let read = (&mut self.stream).take(MAX_LINE_BYTES).read_until(b'\n', &mut line);
        read.map_err(|source| self.silent(name, source))?;
        if line.pop() != Some(b'\n') {
            let ended = io::Error::from(io::ErrorKind::UnexpectedEof);
            return Err(self.silent(name, ended));
        }
        Ok(String::from_utf8_lossy(line.trim_ascii_end()).into_owned())
    }

    /// So many bytes of the answer to `name`.
    pub(super) fn bytes(&mut self, name: &str, count: usize) -> Result<Vec<u8>, SinkError> {
        let mut bytes = vec![0; count];
        self.stream.read_exact(&mut bytes).map_err(|source| self.silent(name, source))?;
        Ok(bytes)
    }

    pub(super) fn refused(&self, name: &str, reason: &str) -> SinkError {
        SinkError::Refused {
            address: self.address.clone(),
            command: name.to_owned(),
            reason: reason.to_owned(),
        }
    }

    fn silent(&self, name: &str, source: io::Error) -> SinkError {
        SinkError::Silent { address: self.address.clone(), command: name.to_owned(), source }
    }
}

fn connect(address: &Address) -> io::Result<Box<dyn Stream>> {
    match address {
        Address::Unix(path) => {
            let stream = UnixStream::connect(path)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            Ok(Box::new(stream))
        }
        Address::Tcp(text) => {
            let mut last = io::Error::other("the name has no address");
            for address in text.to_socket_addrs()? {
                match TcpStream::connect_timeout(&address, PATIENCE) {
                    Ok(stream) => {
                        stream.set_nodelay(true)?;
                        stream.set_read_timeout(Some(PATIENCE))?;
                        stream.set_write_timeout(Some(PATIENCE))?;
                        return Ok(Box::new(stream));
                    }
                    Err(error) => last = error,
                }
            }
            Err(last)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_says_little_by_little_is_not_heard_for_ever() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let talking =
            std::thread::spawn(move || while theirs.write_all(b"STAT a 1\r\n").is_ok() {});
        let until = Instant::now() + Duration::from_millis(50);
        let stream = BufReader::new(Bounded { stream: Box::new(ours), until });
        let mut connection = Connection { address: Address::Tcp("a:1".to_owned()), stream };
        let error = loop {
            match connection.line("stats") {
                Ok(line) => assert_eq!(line, "STAT a 1"),
                Err(error) => break error.to_string(),
            }
        };
        assert!(error.contains("did not answer `stats`: timed out"), "{error}");
        drop(connection);
        talking.join().unwrap();
    }

    #[test]
    fn addresses_are_written_as_they_are_read() {
        for text in ["unix:/run/a.sock", "127.0.0.1:6379", "[::1]:1", "cache.example:11211"] {
            assert_eq!(text.parse::<Address>().expect(text).to_string(), text);
        }
        for text in ["", "unix:a", "unix:", "/run/a.sock", "localhost", ":1", "a:70000"] {
            let error = text.parse::<Address>().expect_err(text);
            assert!(error.contains("HOST:PORT"), "{error}");
        }
    }
}
