//! The client side of `node.sock`, for the command line.

use crate::channel::{self, Receiver};
use crate::message::{
    Answer, PagerAddress, PagerEnd, Place, Request, ResizeLocal, StartPager, StartVm,
};
use crate::report::NodeReport;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// A connection to a node on this host.
#[derive(Debug)]
pub struct NodeClient {
    socket: PathBuf,
    stream: UnixStream,
    receiver: Receiver,
}

/// Why a node did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// It refused, in its own words.
    #[error("{0}")]
    Refused(String),
    /// It ended, or was killed.
    #[error("the node closed the connection; is it still running?")]
    Closed,
    /// It answered with something else.
    #[error("the node answered with something unknown; is it of another version?")]
    Unexpected,
    /// The connection failed.
    #[error("the connection to the node failed")]
    Io(#[from] io::Error),
}

impl NodeClient {
    /// Connects to the node whose control socket is `path`.
    pub fn connect(path: &Path) -> io::Result<NodeClient> {
        let stream = UnixStream::connect(path)?;
        let receiver = Receiver::new(stream.try_clone()?);
        Ok(NodeClient { socket: path.to_owned(), stream, receiver })
    }

    /// Where the node, and the one after it, is reached.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The node and all that it runs.
    pub fn status(&mut self) -> Result<NodeReport, ClientError> {
        match self.ask(&Request::Status)? {
            Answer::Status(report) => Ok(*report),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Starts a pager. This connection is its launch line from here on: [`NodeClient::wait_end`]
    /// tells its end, and to drop the connection lets the pager end once nothing uses it.
    pub fn start_pager(&mut self, wish: StartPager) -> Result<PagerAddress, ClientError> {
        match self.ask(&Request::StartPager(wish))? {
            Answer::Pager(address) => Ok(address),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Starts a virtual machine's pager; as [`NodeClient::start_pager`].
    pub fn start_vm(&mut self, wish: StartVm) -> Result<PagerAddress, ClientError> {
        match self.ask(&Request::StartVm(wish))? {
            Answer::Pager(address) => Ok(address),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Makes this connection the launch line of a pager that was started over another one, to a node
    /// that was killed since.
    pub fn resume(&mut self, known: &PagerAddress) -> Result<PagerAddress, ClientError> {
        match self.ask(&Request::Resume(known.clone()))? {
            Answer::Pager(address) => Ok(address),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Changes a consumer's local memory, and waits until no more than that is local.
    pub fn resize_local(&mut self, consumer: &str, bytes: u64) -> Result<(), ClientError> {
        let wish = ResizeLocal { consumer: consumer.to_owned(), bytes };
        match self.ask(&Request::ResizeLocal(wish))? {
            Answer::Done => Ok(()),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Changes the donors that a consumer's memory may be with; what is elsewhere is moved.
    pub fn place(&mut self, wish: Place) -> Result<(), ClientError> {
        match self.ask(&Request::Place(wish))? {
            Answer::Done => Ok(()),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Begins to bring a virtual machine's memory home.
    pub fn detach(&mut self, consumer: &str) -> Result<(), ClientError> {
        match self.ask(&Request::Detach(consumer.to_owned()))? {
            Answer::Done => Ok(()),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// A second handle on the connection, to say [`LaunchLine::over`] while another thread is in
    /// [`NodeClient::wait_end`].
    pub fn launch_line(&self) -> io::Result<LaunchLine> {
        self.stream.try_clone().map(LaunchLine)
    }

    /// Waits for the end of the pager that was started here.
    pub fn wait_end(&mut self) -> Result<PagerEnd, ClientError> {
        loop {
            match self.receive()? {
                Answer::PagerEnded(end) => return Ok(*end),
                // The answer to `LaunchLine::over`.
                Answer::Done => {}
                _ => return Err(ClientError::Unexpected),
            }
        }
    }

    fn ask(&mut self, request: &Request) -> Result<Answer, ClientError> {
        channel::send(&self.stream, request, &[])?;
        self.receive()
    }

    fn receive(&mut self) -> Result<Answer, ClientError> {
        match self.receiver.receive()?.ok_or(ClientError::Closed)? {
            Answer::Refused(reason) => Err(ClientError::Refused(reason)),
            answer => Ok(answer),
        }
    }
}

/// Says that no further program will be launched.
#[derive(Debug)]
pub struct LaunchLine(UnixStream);

impl LaunchLine {
    /// The pager ends as soon as nothing uses it.
    pub fn over(&self) -> io::Result<()> {
        channel::send(&self.0, &Request::LaunchOver, &[])
    }
}
