"""The dashboard at `/`: a page with a chat and a live view of the pools, and the data for it.

`page/` holds the files that the browser loads unchanged: HTML, a style sheet, ECMAScript modules, no build step.
`assets` serves them, `pool_view` describes the state of the pools, `admin_link` decides whether the page may offer to
drain workers, and `handlers` connects these to HTTP.
"""
