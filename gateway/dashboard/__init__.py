"""The page at `/`: a chat beside the live pools, and what it reads them from.

`page/` holds what the browser loads, as it is: HTML, a style sheet, ECMAScript modules, no build step. `assets` serves
it, `pool_view` words the state of the pools, `admin_link` says whether the page may offer to drain workers, and
`handlers` binds all that to HTTP.
"""
