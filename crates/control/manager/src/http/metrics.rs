//! A node's own metrics, where no manager is to be asked for them.

use crate::http::server::{HttpServer, ServeError};
use axum::http::header;
use axum::routing::get;
use axum::{Router, response::IntoResponse};
use hecaton_node::cluster::metrics::{CONTENT_TYPE, render};
use hecaton_node::cluster::report::NodeReport;
use std::net::SocketAddr;
use std::sync::Arc;

/// Serves `GET /metrics`.
#[derive(Debug)]
pub struct MetricsServer(HttpServer);

impl MetricsServer {
    /// Serves on `address` what `report` tells at each request. To be called within a tokio
    /// runtime.
    pub async fn start(
        address: SocketAddr,
        report: impl Fn() -> Vec<NodeReport> + Send + Sync + 'static,
    ) -> Result<MetricsServer, ServeError> {
        let report = Arc::new(report);
        let metrics = move || {
            let text = render(&report());
            async move { ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response() }
        };
        let router = Router::new().route("/metrics", get(metrics));
        HttpServer::start(address, "--metrics", router, None).await.map(MetricsServer)
    }

    /// Stops, and lets go of `report`.
    pub async fn stop(self) {
        self.0.stop().await;
    }
}
