//! A router whose routes are all documented.

use axum::Router;
use axum::handler::Handler;
use axum::routing::{MethodRouter, delete, get, head, post};
use http::Method;
use tower_http::catch_panic::CatchPanicLayer;

use super::Operation;
use crate::http::dialect::Dialect;
use crate::http::{HttpState, errors};

/// Routes, and what is said of them.
#[derive(Default)]
pub(in crate::http) struct Routes {
    /// What serves them.
    pub(in crate::http) router: Router<HttpState>,
    /// What is said of them, in the order in which they were added.
    pub(in crate::http) documented: Vec<Route>,
}

/// A route, and what is said of it.
pub(in crate::http) struct Route {
    pub(in crate::http) method: Method,
    /// As the router has it.
    pub(in crate::http) path: &'static str,
    pub(super) operation: Operation,
}

impl Routes {
    /// Answers GET, and HEAD with what GET would have at its head.
    pub(in crate::http) fn get<H, T>(self, path: &'static str, handler: H, operation: Operation) -> Self
    where
        H: Handler<T, HttpState>,
        T: 'static,
    {
        self.add(Method::GET, path, get(handler), operation)
    }

    /// Answers HEAD alone.
    pub(in crate::http) fn head<H, T>(self, path: &'static str, handler: H, operation: Operation) -> Self
    where
        H: Handler<T, HttpState>,
        T: 'static,
    {
        self.add(Method::HEAD, path, head(handler), operation)
    }

    /// Answers POST.
    pub(in crate::http) fn post<H, T>(self, path: &'static str, handler: H, operation: Operation) -> Self
    where
        H: Handler<T, HttpState>,
        T: 'static,
    {
        self.add(Method::POST, path, post(handler), operation)
    }

    /// Answers DELETE.
    pub(in crate::http) fn delete<H, T>(self, path: &'static str, handler: H, operation: Operation) -> Self
    where
        H: Handler<T, HttpState>,
        T: 'static,
    {
        self.add(Method::DELETE, path, delete(handler), operation)
    }

    fn add(
        mut self,
        method: Method,
        path: &'static str,
        handler: MethodRouter<HttpState>,
        operation: Operation,
    ) -> Self {
        self.router = self.router.route(path, handler);
        self.documented.push(Route { method, path, operation });
        self
    }

    /// Says of a route that GET answers what its own router has.
    pub(in crate::http) fn describe(&mut self, path: &'static str, operation: Operation) {
        self.documented.push(Route { method: Method::GET, path, operation });
    }

    /// With these besides.
    pub(in crate::http) fn merge(mut self, others: Routes) -> Self {
        self.router = self.router.merge(others.router);
        self.documented.extend(others.documented);
        self
    }

    /// Panics of the handlers so far are answered in this envelope.
    pub(in crate::http) fn panics_as(mut self, dialect: Dialect) -> Self {
        self.router = self.router.layer(CatchPanicLayer::custom(move |panic| errors::panicked(panic, dialect)));
        self
    }
}
