//! The client side of `node.sock`, for the command line.

use crate::channel::{self, Receiver};
use crate::cluster::report::{DonorAddress, NodeReport};
use crate::socket::message::{
    Admitted, Answer, AttachVolume, CreateVm, CreateVolume, DetachVolume, Export, PagerAddress,
    PagerEnd, Place, Request, ResizeLocal, ResizeVolume, SnapshotVolume, StartPager, StartVm,
    Unexport,
};
use crate::volumes::ExportAddress;
use std::io;
use std::net::SocketAddr;
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

    /// The donors that it knows of.
    pub fn donors(&mut self) -> Result<Vec<DonorAddress>, ClientError> {
        match self.ask(&Request::Donors)? {
            Answer::Donors(donors) => Ok(donors),
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

    /// Makes this connection the launch line of a pager that was started over another one, to a
    /// node that was killed since.
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

    /// Waits until the agent has memory for a machine, which this process is to become.
    pub fn create_vm(&mut self, wish: CreateVm) -> Result<Admitted, ClientError> {
        match self.ask(&Request::CreateVm(wish))? {
            Answer::Admitted(admitted) => Ok(admitted),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Creates a volume, and waits until it is served.
    pub fn create_volume(&mut self, wish: CreateVolume) -> Result<(), ClientError> {
        match self.ask(&Request::CreateVolume(wish))? {
            Answer::Done => Ok(()),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Has a volume served at one more address; that with its port.
    pub fn export_volume(&mut self, wish: Export) -> Result<ExportAddress, ClientError> {
        match self.ask(&Request::ExportVolume(wish))? {
            Answer::Exported(address) => Ok(address),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Has a volume served at an address no more.
    pub fn unexport_volume(&mut self, wish: Unexport) -> Result<(), ClientError> {
        match self.ask(&Request::UnexportVolume(wish))? {
            Answer::Done => Ok(()),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Gives a volume another size.
    pub fn resize_volume(&mut self, wish: ResizeVolume) -> Result<(), ClientError> {
        match self.ask(&Request::ResizeVolume(wish))? {
            Answer::Done => Ok(()),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Copies a volume as it is at one moment, and waits until the copy is served.
    pub fn snapshot_volume(&mut self, wish: SnapshotVolume) -> Result<(), ClientError> {
        match self.ask(&Request::SnapshotVolume(wish))? {
            Answer::Done => Ok(()),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Gives a volume's memory back, with all data.
    pub fn delete_volume(&mut self, name: &str) -> Result<(), ClientError> {
        match self.ask(&Request::DeleteVolume(name.to_owned()))? {
            Answer::Done => Ok(()),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Lets another node have a volume; where it is to connect. Nowhere, of a volume that was only
    /// read here.
    pub fn detach_volume(&mut self, wish: DetachVolume) -> Result<Option<SocketAddr>, ClientError> {
        match self.ask(&Request::DetachVolume(wish))? {
            Answer::Detached(address) => Ok(Some(address)),
            Answer::Done => Ok(None),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Has a volume of another node, and waits until it is served.
    pub fn attach_volume(&mut self, wish: AttachVolume) -> Result<(), ClientError> {
        match self.ask(&Request::AttachVolume(wish))? {
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
