//! The HTTP API for applications that ask themselves, and for whoever wants to see how it stands.

use crate::manager::News;
use crate::state::State;
use axum::extract::{Path, Query, State as Of};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::{Deserialize, Deserializer};
use std::sync::mpsc::Sender;
use std::time::Duration;
use tokio::sync::watch;

/// The longest that a request waits.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(300);

/// State of the routes.
#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) state: watch::Receiver<State>,
    pub(crate) news: Sender<News>,
}

/// Query parameters of `GET /v1/state`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Since {
    /// The version that the caller knows.
    since: Option<u64>,
    /// How long it would wait for a later one.
    #[serde(default, deserialize_with = "seconds")]
    wait: Duration,
}

/// Body of `POST /v1/applications/NAME/ready`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Ready {
    order: u64,
}

/// As `30s`.
fn seconds<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(from)?;
    let wait = text.strip_suffix('s').and_then(|number| number.parse().ok());
    let wait = wait.map(Duration::from_secs).filter(|wait| *wait <= MAX_WAIT);
    wait.ok_or_else(|| {
        let most = MAX_WAIT.as_secs();
        serde::de::Error::custom(format!("`{text}` is not from 0s to {most}s, such as 30s"))
    })
}

type Refusal = (StatusCode, String);

pub(crate) fn router(api: Api) -> Router {
    Router::new()
        .route("/v1/state", get(state))
        .route("/v1/applications/{name}/ready", post(ready))
        .fallback(|| async { (StatusCode::NOT_FOUND, "there is nothing at this path\n") })
        .with_state(api)
}

async fn state(Of(mut api): Of<Api>, Query(asked): Query<Since>) -> Result<Json<State>, Refusal> {
    if asked.since.is_none() && !asked.wait.is_zero() {
        let text = "wait needs since: the version that is known, which another one is waited for\n";
        return Err((StatusCode::BAD_REQUEST, text.to_owned()));
    }
    if let Some(since) = asked.since {
        // Other than what is known, and not later: a manager that was started again counts from the
        // beginning.
        let changed = api.state.wait_for(|state| state.version != since);
        // Time that is up is answered as well, with what is so.
        drop(tokio::time::timeout(asked.wait, changed).await);
    }
    let state = api.state.borrow().clone();
    Ok(Json(state))
}

async fn ready(
    Of(api): Of<Api>,
    Path(name): Path<String>,
    Json(Ready { order }): Json<Ready>,
) -> Result<StatusCode, Refusal> {
    let found = {
        let state = api.state.borrow();
        let mut applications = state.applications.iter().enumerate();
        applications.find(|(_, one)| one.name == name).map(|(at, one)| (at, one.clone()))
    };
    let refuse = |status, text: String| Err((status, text + "\n"));
    let Some((application, one)) = found else {
        return refuse(StatusCode::NOT_FOUND, format!("there is no application `{name}`"));
    };
    if one.kind != "api" {
        let kind = &one.kind;
        let text = format!("application `{name}` is told by {kind}, and confirms nothing itself");
        return refuse(StatusCode::CONFLICT, text);
    }
    if one.order != order {
        let text = format!("order {order} of `{name}` is not in force, but {}", one.order);
        return refuse(StatusCode::CONFLICT, text);
    }
    match api.news.send(News::Settled { application, order }) {
        Ok(()) => Ok(StatusCode::NO_CONTENT),
        Err(_) => refuse(StatusCode::SERVICE_UNAVAILABLE, "the manager ends".to_owned()),
    }
}
