//! A bound on the API's connections, and on how long each may take.
//!
//! Without a bound, clients could exhaust the manager's descriptors and memory. The host's notices
//! would then be lost. At the bound the kernel queues further connections. So that the queue moves
//! on, a connection is cut if it sends no request, sends it too slowly, or does not read the
//! answer.

use crate::api::MAX_WAIT;
use axum::serve::Listener;
use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};

/// Most connections at an address.
pub(crate) const MAX_CONNECTIONS: usize = 64;

/// How long a connection may be without a request, or leave an answer where it is.
const IDLE: Duration = Duration::from_secs(10);

/// How long a request may take, from its first byte to its answer; one may wait for a change.
const REQUEST: Duration = Duration::from_secs(MAX_WAIT.as_secs() + 10);

/// Takes no more connections than there are places.
pub(crate) struct Bounded<L> {
    listener: L,
    places: Arc<Semaphore>,
}

impl<L> Bounded<L> {
    pub(crate) fn new(listener: L) -> Self {
        Self { listener, places: Arc::new(Semaphore::new(MAX_CONNECTIONS)) }
    }
}

impl<L: Listener> Listener for Bounded<L>
where
    L::Io: Unpin,
{
    type Io = Timed<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let places = Arc::clone(&self.places);
        let place = places.acquire_owned().await.expect("it is never closed");
        let (stream, address) = self.listener.accept().await;
        (Timed::new(stream, place), address)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// A connection that fails once its time is up.
pub(crate) struct Timed<S> {
    stream: S,
    deadline: Pin<Box<Sleep>>,
    /// Something was read that was not answered yet.
    is_asked: bool,
    _place: OwnedSemaphorePermit,
}

impl<S> Timed<S> {
    fn new(stream: S, place: OwnedSemaphorePermit) -> Self {
        Self { stream, deadline: Box::pin(sleep(IDLE)), is_asked: false, _place: place }
    }

    fn allow(&mut self, time: Duration) {
        self.deadline.as_mut().reset(Instant::now() + time);
    }

    /// Whether its time is up; if not, it is polled again then.
    fn poll_time(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.deadline.as_mut().poll(context) {
            Poll::Ready(()) => Err(ErrorKind::TimedOut.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Timed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll_time(context)?;
        ready!(Pin::new(&mut self.stream).poll_read(context, bytes))?;
        // From its first byte: one that sends a byte now and then has no more time for it.
        if !std::mem::replace(&mut self.is_asked, true) {
            self.allow(REQUEST);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Timed<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if std::mem::take(&mut self.is_asked) {
            self.allow(IDLE);
        }
        self.poll_time(context)?;
        let written = ready!(Pin::new(&mut self.stream).poll_write(context, bytes))?;
        self.allow(IDLE);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};

    fn connection() -> (Timed<DuplexStream>, DuplexStream) {
        let (server, client) = duplex(64);
        let place = Arc::new(Semaphore::new(1)).try_acquire_owned().expect("it is free");
        (Timed::new(server, place), client)
    }

    /// When it is cut, in seconds of a clock that goes on by itself.
    async fn cut_after(server: &mut Timed<DuplexStream>, begun: Instant) -> u64 {
        let mut bytes = [0; 64];
        loop {
            if let Err(error) = server.read(&mut bytes).await {
                assert_eq!(error.kind(), ErrorKind::TimedOut);
                return begun.elapsed().as_secs();
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_asks_nothing_is_cut() {
        let (mut server, _client) = connection();
        assert_eq!(cut_after(&mut server, Instant::now()).await, IDLE.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_asks_a_byte_at_a_time_is_cut() {
        let (mut server, mut client) = connection();
        let begun = Instant::now();
        let asks = async {
            while client.write_all(b"G").await.is_ok() {
                tokio::time::sleep(Duration::from_secs(5)).await;
            }
        };
        tokio::select! {
            after = cut_after(&mut server, begun) => assert_eq!(after, REQUEST.as_secs()),
            () = asks => panic!("its bytes are not taken"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_does_not_take_its_answer_is_cut_and_one_that_waits_is_not() {
        let (mut server, mut client) = connection();
        client.write_all(b"GET").await.unwrap();
        server.read_exact(&mut [0; 3]).await.unwrap();
        tokio::time::sleep(MAX_WAIT).await;
        let begun = Instant::now();
        let error = server.write_all(&[0; 100]).await.expect_err("nobody reads");
        assert_eq!(
            (error.kind(), begun.elapsed().as_secs()),
            (ErrorKind::TimedOut, IDLE.as_secs())
        );
    }
}
